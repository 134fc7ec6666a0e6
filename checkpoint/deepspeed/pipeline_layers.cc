#include "checkpoint/deepspeed/pipeline_layers.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "core/check.h"

namespace ds::checkpoint {
namespace {

std::string name_in_layer(int layer, const std::string& name) { return cat(layer, ".", name); }
std::string name_in_tie(const std::string& key, const std::string& name) { return cat(kTiedModules, key, ".", name); }

// "embed" of "tied_modules.embed.weight"; empty for other names.
std::string key_in(const std::string& name) {
  if (!name.starts_with(kTiedModules)) return {};
  const std::string rest = name.substr(kTiedModules.size());
  return rest.substr(0, rest.find('.'));
}

PickleField state_of(const TorchArchive& archive) { return {archive.root(), archive.path()}; }

}  // namespace

PipelineLayers::PipelineLayers(const SavedFolder& folder, const std::vector<SavedCheckpoint>& saved,
                               const std::vector<SavedLayout>& trained)
    : folder_(folder), trained_(trained), files_(static_cast<size_t>(folder.layer_ranks())), zero_(saved[0].stage > 0) {
  for (const auto& [layer, paths] : folder.layers) {
    for (size_t rank = 0; rank < paths.size(); ++rank) {
      files_[rank].push_back({.layer = layer, .archive = std::make_shared<TorchArchive>(paths[rank])});
    }
  }
  for (const SavedCheckpoint& one : saved) {
    const PickleField names = one.model().at("buffer_names");
    for (size_t i = 0; i < names.size(); ++i) buffers_.insert(names.item(i).text());
  }
  for (const std::string& name : buffers_) keys_.insert(key_in(name));
  for (const SavedLayout& layout : trained) {
    for (const auto& [path, info] : layout.tensors.tensors()) keys_.insert(key_in(name_in(weight_path(""), path)));
  }
  keys_.erase("");
  require_files();
}

// Layers without weights, as functions, have no file.
void PipelineLayers::require_files() const {
  for (const SavedLayout& layout : trained_) {
    for (const auto& [path, info] : layout.tensors.tensors()) {
      const std::string name = name_in(weight_path(""), path);
      const std::string number = name.substr(0, name.find('.'));
      if (number.empty() || number.find_first_not_of("0123456789") != std::string::npos || number.size() > 7) continue;
      require<IoError>(folder_.layers.contains(std::stoi(number)), folder_.model_ranks[0].folder, ": no file of layer ",
                       number, " (layer_", number.size() < 2 ? "0" : "", number, "[-model_MM]-model_states.pt), of ",
                       "which \"", name, "\" is trained; every layer's file is needed");
    }
  }
}

SavedLayout PipelineLayers::of_rank(size_t model_rank) const {
  SavedLayout layout;
  for (const LayerFile& file : files_[model_rank]) {
    add_layer(file, model_rank, layout);
    file.archive->forget();
  }
  return layout;
}

const SavedLayout* PipelineLayers::trained_at(const std::string& name, size_t model_rank) const {
  for (size_t i = model_rank; i < trained_.size(); i += files_.size()) {
    if (trained_[i].tensors.tensors().contains(weight_path(name))) return &trained_[i];
  }
  return nullptr;
}

void PipelineLayers::add_layer(const LayerFile& file, size_t model_rank, SavedLayout& layout) const {
  const std::string key = key_of(file, model_rank);
  for (const auto& [name, field] : state_of(*file.archive).entries()) {
    const std::string full = key.empty() ? name_in_layer(file.layer, name) : name_in_tie(key, name);
    const TensorReference& tensor = field.tensor();
    const bool buffer = buffers_.contains(full);
    if (const SavedLayout* trained = trained_at(full, model_rank)) {
      const std::vector<int64_t>& sizes = trained->tensors.tensors().at(weight_path(full)).sizes;
      if (tensor.sizes != sizes) {
        field.fail(cat("layer ", file.layer, ": \"", full, "\" has the shape ", c10::IntArrayRef(tensor.sizes),
                       ", the optimizer's files have it in ", c10::IntArrayRef(sizes),
                       "; the folder holds more than one checkpoint"));
      }
      continue;
    }
    const std::string path = buffer ? buffer_path(full) : weight_path(full);
    if (layout.tensors.tensors().contains(path)) continue;  // of another layer of this key
    layout.tensors.define_whole(field.where(), path, layout.tensors.add(file.archive, tensor),
                                /*frozen=*/!buffer && zero_);
  }
}

// The key of a tied layer; empty: it is not tied, or nothing tells (without names in the optimizer's files).
std::string PipelineLayers::key_of(const LayerFile& file, size_t model_rank) const {
  const auto entries = state_of(*file.archive).entries();
  const bool own = std::any_of(entries.begin(), entries.end(), [&](const auto& entry) {
    const std::string full = name_in_layer(file.layer, entry.first);
    return buffers_.contains(full) || trained_at(full, model_rank) != nullptr;
  });
  if (own || entries.empty()) return {};
  const auto found = std::find_if(keys_.begin(), keys_.end(),
                                  [&](const std::string& key) { return is_of_key(file, model_rank, key); });
  return found == keys_.end() ? std::string() : *found;
}

// Whether the optimizer's files have weights of the key with these values, in the layer's precision.
bool PipelineLayers::is_of_key(const LayerFile& file, size_t model_rank, const std::string& key) const {
  bool any = false;
  for (const auto& [name, field] : state_of(*file.archive).entries()) {
    const std::string full = name_in_tie(key, name);
    if (buffers_.contains(full)) {
      any = true;
      continue;
    }
    const SavedLayout* const trained = trained_at(full, model_rank);
    if (trained == nullptr) return false;
    const TensorReference& tensor = field.tensor();
    const TensorInfo& info = trained->tensors.tensors().at(weight_path(full));
    if (info.sizes != tensor.sizes) return false;
    const at::Tensor master = at::empty(info.sizes, info.dtype);
    trained->tensors.read(weight_path(full), 0, master);
    if (!master.to(tensor.dtype).equal(file.archive->tensor(tensor))) return false;
    any = true;
  }
  return any;
}

}  // namespace ds::checkpoint
