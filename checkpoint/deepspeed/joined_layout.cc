#include "checkpoint/deepspeed/joined_layout.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "checkpoint/deepspeed/pipeline_layers.h"
#include "core/check.h"
#include "core/split/part_runs.h"

namespace ds::checkpoint {
namespace {

constexpr const char* kRules = "universal_checkpoint_info";
constexpr const char* kReplicated = "tp_replicated_parameter_patterns";
constexpr const char* kRows = "parameter_with_row_parallelism_patterns";
constexpr const char* kVocabulary = "vocabulary_parameter_patterns";
constexpr const char* kTwoHalves = "parameter_with_2_sub_params_cat_dim_0";
// Parts that are no ranges of one dimension, or that differ on the ranks although each has all.
constexpr const char* kUnread[] = {"parameter_to_average_patterns", "parameter_with_sub_params", "affine_map"};

bool has_nothing(const PickleField& field) {
  if (field.is_list()) return field.size() == 0;
  return field.is(PickleKind::kDict) && field.entries().empty();
}

// "weights/" of "weights/h.0.b", "optimizer/exp_avg/" of "optimizer/exp_avg/h.0.b".
std::string folder_of(const std::string& path) { return path.substr(0, path.rfind('/') + 1); }
std::string name_of(const std::string& path) { return path.substr(path.rfind('/') + 1); }

// Returns the name in dsengine's PipelineModule, which registers tied layers under their key alone.
std::string without_tie(const std::string& name) {
  return name.starts_with(kTiedModules) ? name.substr(kTiedModules.size()) : name;
}

std::string shown(const std::vector<std::vector<int64_t>>& sizes) {
  std::string text;
  for (const auto& one : sizes) text += cat(text.empty() ? "" : ", ", c10::IntArrayRef(one));
  return text;
}

// The sizes of the full tensor; none where these parts of ranks do not fit the cut.
std::optional<std::vector<int64_t>> joined_sizes(const std::vector<std::vector<int64_t>>& parts, const Cut& cut) {
  std::vector<int64_t> whole = parts[0];
  const auto dim = static_cast<size_t>(cut.dim);
  if (dim >= whole.size()) return std::nullopt;
  whole[dim] *= static_cast<int64_t>(parts.size());
  const bool equal = std::all_of(parts.begin(), parts.end(), [&](const auto& one) { return one == parts[0]; });
  if (!equal || !cut_problem(cut, whole[dim]).empty()) return std::nullopt;
  return whole;
}

// Returns, for messages, the path of a rank's file of the layer whose number begins the name in `path`. Names of tied
// layers have no number: for these a pattern of all such files.
std::string layer_file(const SavedFolder& folder, size_t rank, const std::string& path) {
  const std::string name = name_of(path);
  for (const auto& [layer, files] : folder.layers) {
    if (name.starts_with(cat(layer, "."))) return files[rank];
  }
  return cat(folder.model_ranks[0].folder, "/layer_*-model_states.pt");
}

}  // namespace

PartRules::PartRules(const PickleField& model) {
  const std::optional<PickleField> info = model.find(kRules);
  if (!info) return;
  where_ = info->where();
  for (const char* key : kUnread) {
    const auto unread = info->find(key);
    if (unread && !has_nothing(*unread)) {
      unread->fail("parts of this kind cannot be read; convert the checkpoint with DeepSpeed's ds_to_universal");
    }
  }
  for (const char* key : {kReplicated, kRows, kVocabulary, kTwoHalves}) {
    const auto list = info->find(key);
    for (size_t i = 0; list && i < list->size(); ++i) {
      const std::string& text = list->item(i).text();
      if (const std::string problem = regex_problem(text); !problem.empty()) {
        list->item(i).fail(cat("\"", text, "\" is no regular expression: ", problem));
      }
      patterns_[key].push_back(NamePattern::regex(text));
    }
  }
  if (const auto rows = info->find("original_vocab_size")) rows_ = rows->integer();
}

bool PartRules::is_in(const char* kind, const std::string& name) const {
  const auto found = patterns_.find(kind);
  return found != patterns_.end() && std::any_of(found->second.begin(), found->second.end(), [&](const auto& pattern) {
           return pattern.matches(name, NamePart::kStart);
         });
}

RankParts PartRules::parts_of(const std::string& name) const {
  if (is_in(kReplicated, name)) return {};
  RankParts parts{.cut = Cut{.dim = is_in(kRows, name) ? 1 : 0}, .rows = std::nullopt};
  if (is_in(kTwoHalves, name)) parts.cut->repeats = 2;
  if (is_in(kVocabulary, name)) parts.rows = rows_;
  return parts;
}

JoinedLayout::JoinedLayout(const SavedFolder& folder, const std::vector<SavedCheckpoint>& saved) {
  const bool pipeline = !folder.layers.empty();
  const auto cuts = pipeline ? static_cast<size_t>(folder.layer_ranks()) : saved.size();
  if (cuts > 1) rules_.emplace(saved[0].model());
  for (const SavedCheckpoint& one : saved) layouts_.push_back(lay_out(one));
  if (pipeline) {
    const PipelineLayers layers(folder, saved, layouts_);
    std::vector<SavedLayout> of_layers;
    for (size_t rank = 0; rank < cuts; ++rank) of_layers.push_back(layers.of_rank(rank));
    for (SavedLayout& one : of_layers) layouts_.push_back(std::move(one));
  }
  for (size_t first = 0; first < layouts_.size(); first += cuts) {
    std::vector<const SavedLayout*> ranks;
    for (size_t i = first; i < first + cuts; ++i) ranks.push_back(&layouts_[i]);
    join_stage(ranks, [&](size_t rank, const std::string& path) {
      return first < saved.size() ? saved[first + rank].files.model_states[0] : layer_file(folder, rank, path);
    });
  }
}

void JoinedLayout::require_same_paths(const std::vector<const SavedLayout*>& ranks, const FileOf& file_of) {
  const auto require_all_in = [&](size_t other, size_t one) {
    for (const auto& [path, info] : ranks[one]->tensors.tensors()) {
      require<IoError>(ranks[other]->tensors.tensors().contains(path), file_of(other, path), ": has no \"", path,
                       "\", which ", file_of(one, path), " has; the folder holds more than one checkpoint");
    }
  };
  for (size_t i = 1; i < ranks.size(); ++i) {
    require_all_in(i, 0);
    require_all_in(0, i);
  }
}

// A tied weight is in the files of several stages, with the same values.
void JoinedLayout::join_stage(const std::vector<const SavedLayout*>& ranks, const FileOf& file_of) {
  require_same_paths(ranks, file_of);
  for (const auto& [alias, name] : ranks[0]->aliases) aliases_.emplace(without_tie(alias), without_tie(name));
  for (const auto& [path, first] : ranks[0]->tensors.tensors()) {
    const std::string shown_path = folder_of(path) + without_tie(name_of(path));
    std::vector<std::vector<int64_t>> sizes;
    for (const auto* rank : ranks) sizes.push_back(rank->tensors.tensors().at(path).sizes);
    TensorInfo info = first;
    Place place{.path = path, .ranks = {ranks[0]}, .parts = {}};
    const RankParts parts = ranks.size() == 1 ? RankParts() : parts_of(path, ranks, file_of);
    if (parts.cut) {
      const auto whole = joined_sizes(sizes, *parts.cut);
      require<IoError>(whole.has_value(), file_of(0, path), ": \"", path, "\": parts of shapes ", shown(sizes), " on ",
                       ranks.size(), " model-parallel ranks do not make up a tensor along dimension ", parts.cut->dim,
                       "; correct ", kRules);
      place.ranks = ranks;
      for (size_t i = 0; i < ranks.size(); ++i) {
        place.parts.emplace_back(*whole, *parts.cut, static_cast<int>(i), static_cast<int>(ranks.size()));
      }
      info.sizes = *whole;
      if (parts.rows && *parts.rows > 0 && *parts.rows < info.sizes[0]) info.sizes[0] = *parts.rows;
    } else {
      const bool alike = std::all_of(sizes.begin(), sizes.end(), [&](const auto& one) { return one == sizes[0]; });
      require<IoError>(alike, file_of(0, path), ": \"", path, "\": expected one shape on ", ranks.size(),
                       " model-parallel ranks, which each have all of it by ", kRules, ", found ", shown(sizes));
    }
    define(shown_path, std::move(info), std::move(place), file_of(0, path));
  }
}

// Buffers have no patterns. Without any patterns only what all ranks have alike is told from parts; what they may have
// alike by chance, as biases that are still zeros, is not.
RankParts JoinedLayout::parts_of(const std::string& path, const std::vector<const SavedLayout*>& ranks,
                                 const FileOf& file_of) const {
  const bool buffer = path.starts_with(buffer_path(""));
  if (rules_->given() && !buffer) return rules_->parts_of(name_of(path));
  // Moments of a weight are cut as the weight is, and may still be zeros.
  const std::string weight = buffer ? path : weight_path(name_of(path));
  require<IoError>(are_equal(weight, ranks), file_of(0, path), ": \"", path, "\": parts of shape ",
                   c10::IntArrayRef(ranks[0]->tensors.tensors().at(path).sizes), " on ", ranks.size(),
                   " model-parallel ranks, and nothing says along which dimension they are joined. Save with ",
                   "client_state={\"", kRules, "\": {...}}, as Megatron-DeepSpeed does: patterns for names in ",
                   kReplicated, ", ", kRows, ", ", kVocabulary, " and ", kTwoHalves);
  return {};
}

bool JoinedLayout::are_equal(const std::string& path, const std::vector<const SavedLayout*>& ranks) const {
  const auto values = [&](const SavedLayout& layout) {
    const TensorInfo& info = layout.tensors.tensors().at(path);
    at::Tensor whole = at::empty(info.sizes, info.dtype);
    layout.tensors.read(path, 0, whole);
    return whole;
  };
  const at::Tensor first = values(*ranks[0]);
  const bool buffer = path.starts_with(buffer_path(""));
  if (!buffer && first.numel() > 0 && first.eq(first.reshape({-1})[0]).all().item<bool>()) return false;
  return std::all_of(ranks.begin() + 1, ranks.end(), [&](const SavedLayout* layout) {
    return layout->tensors.tensors().contains(path) && values(*layout).equal(first);
  });
}

void JoinedLayout::define(const std::string& path, TensorInfo info, Place place, const std::string& file) {
  const auto [entry, added] = infos_.emplace(path, info);
  if (added) places_.emplace(path, std::move(place));
  require<IoError>(entry->second.sizes == info.sizes, file, ": \"", path, "\" has the shape ",
                   c10::IntArrayRef(info.sizes), ", another stage has it in ", c10::IntArrayRef(entry->second.sizes),
                   "; the folder holds more than one checkpoint");
}

void JoinedLayout::read(const std::string& path, int64_t offset, const at::Tensor& destination) const {
  const Place& place = places_.at(path);
  if (place.parts.empty()) return place.ranks[0]->tensors.read(place.path, offset, destination);
  const at::Tensor flat = destination.detach().view({-1});
  for (size_t i = 0; i < place.parts.size(); ++i) {
    // The elements of a range are one range of each part.
    int64_t begin = -1;
    int64_t end = 0;
    const PartRuns runs(place.parts[i]);
    runs.in_whole(offset, offset + flat.numel(), [&](int64_t /*whole*/, int64_t part, int64_t length) {
      if (begin < 0) begin = part;
      end = part + length;
    });
    if (begin < 0) continue;
    const at::Tensor values = at::empty({end - begin}, flat.options());
    place.ranks[i]->tensors.read(place.path, begin, values);
    runs.in_whole(offset, offset + flat.numel(), [&](int64_t whole, int64_t part, int64_t length) {
      flat.narrow(0, whole - offset, length).copy_(values.narrow(0, part - begin, length));
    });
  }
}

}  // namespace ds::checkpoint
