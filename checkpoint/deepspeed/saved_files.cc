#include "checkpoint/deepspeed/saved_files.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <optional>
#include <string_view>

#include "core/check.h"
#include "core/system_call.h"

namespace ds::checkpoint {
namespace {

constexpr const char* kModelEnd = "_model_states.pt";
constexpr const char* kOptimEnd = "_optim_states.pt";

// [[bf16_|fp16_]zero_pp_rank_R_]mp_rank_M_(model|optim)_states.pt
struct StateFileName {
  std::string rank;  // digits; empty: without
  std::string model_rank;
  bool optim = false;
};

bool take_word(std::string_view& text, std::string_view word) {
  if (!text.starts_with(word)) return false;
  text.remove_prefix(word.size());
  return true;
}

// Digits at the front; none where there are more than a rank can have.
std::string take_digits(std::string_view& text) {
  constexpr size_t kMostDigits = 7;
  const size_t count = std::min(text.find_first_not_of("0123456789"), text.size());
  const std::string digits(text.substr(0, count > kMostDigits ? 0 : count));
  text.remove_prefix(digits.size());
  return digits;
}

std::optional<StateFileName> parsed(std::string_view text) {
  StateFileName name;
  const bool prefixed = take_word(text, "bf16_") || take_word(text, "fp16_");
  if (take_word(text, "zero_pp_rank_")) {
    name.rank = take_digits(text);
    if (name.rank.empty() || !take_word(text, "_")) return std::nullopt;
  } else if (prefixed) {
    return std::nullopt;
  }
  if (!take_word(text, "mp_rank_")) return std::nullopt;
  name.model_rank = take_digits(text);
  name.optim = text == kOptimEnd;
  if (name.model_rank.empty() || (!name.optim && text != kModelEnd)) return std::nullopt;
  return name;
}

// Names in the folder that are DeepSpeed's, sorted.
std::vector<std::string> state_files_in(const std::string& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (std::filesystem::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (name.ends_with(kModelEnd) || name.ends_with("-model_states.pt") || name.ends_with(kOptimEnd)) {
      names.push_back(name);
    }
  }
  require<IoError>(!error, folder, ": cannot list the folder: ", SystemReason(error));
  std::sort(names.begin(), names.end());
  return names;
}

// Paths by rank, without a gap.
std::vector<std::string> in_order(const std::string& folder, const std::map<int, std::string>& by_rank,
                                  const char* kind) {
  std::vector<std::string> paths;
  for (const auto& [rank, name] : by_rank) {
    require<IoError>(rank == static_cast<int>(paths.size()), folder, ": no ", kind, " file of rank ", paths.size(),
                     ", but that of rank ", rank, " (", name, "); every rank's file is needed");
    paths.push_back(cat(folder, "/", name));
  }
  return paths;
}

void require_known(const std::string& path, const std::string& name, bool known) {
  require<IoError>(name.find("expert_") == std::string::npos && !name.starts_with("expp_"), path,
                   ": of a model with experts; only checkpoints without experts can be read");
  require<IoError>(known, path,
                   ": not a file name of DeepSpeed's checkpoints, which are layer_LL[-model_MM]-model_states.pt, "
                   "[zero_pp_rank_R_]mp_rank_MM_model_states.pt and "
                   "[bf16_]zero_pp_rank_R_mp_rank_MM_optim_states.pt");
}

// layer_LL[-model_MM]-model_states.pt
struct LayerFileName {
  int layer = 0;
  int model_rank = 0;
};

std::optional<LayerFileName> parsed_layer(std::string_view text) {
  if (!take_word(text, "layer_")) return std::nullopt;
  const std::string layer = take_digits(text);
  std::string model_rank = "0";
  if (!text.starts_with("-model_states") && take_word(text, "-model_")) model_rank = take_digits(text);
  if (layer.empty() || model_rank.empty() || text != "-model_states.pt") return std::nullopt;
  return LayerFileName{.layer = std::stoi(layer), .model_rank = std::stoi(model_rank)};
}

// The files of one model-parallel rank, as they are found.
struct FilesOfRank {
  std::map<int, std::string> whole, parts, optim;  // by data-parallel rank

  SavedFiles files(const std::string& folder, int model_rank) const {
    require<IoError>(whole.empty() || parts.empty(), folder, ": both ", whole.empty() ? "" : whole.begin()->second,
                     " and files of a partitioned model; the folder holds more than one checkpoint");
    SavedFiles files{.folder = folder, .model_states = {}, .optim_states = {}, .partitioned_model = !parts.empty()};
    files.model_states = in_order(folder, parts.empty() ? whole : parts, "model_states.pt");
    files.optim_states = in_order(folder, optim, "optim_states.pt");
    const std::string number = cat(model_rank < 10 ? "0" : "", model_rank);
    require<IoError>(!files.model_states.empty(), folder, ": no mp_rank_", number, "_model_states.pt and no ",
                     "zero_pp_rank_0_mp_rank_", number, "_model_states.pt");
    return files;
  }
};

// Every layer that has a file has one of each model-parallel rank.
std::map<int, std::vector<std::string>> layers_in_order(const std::string& folder,
                                                        const std::map<int, std::map<int, std::string>>& layers) {
  std::map<int, std::vector<std::string>> result;
  for (const auto& [layer, by_rank] : layers) {
    result[layer] = in_order(folder, by_rank, cat("layer_", layer).c_str());
    require<IoError>(result[layer].size() == result.begin()->second.size(), folder, ": layer ", layer, " has files of ",
                     result[layer].size(), " model-parallel ranks, layer ", result.begin()->first, " of ",
                     result.begin()->second.size(), "; every rank's file is needed");
  }
  return result;
}

}  // namespace

bool holds_deepspeed_files(const std::string& folder) { return !state_files_in(folder).empty(); }

SavedFolder find_saved_files(const std::string& folder) {
  std::map<int, FilesOfRank> ranks;
  std::map<int, std::map<int, std::string>> layers;
  const auto add = [&folder](std::map<int, std::string>& by_rank, int rank, const std::string& name) {
    const auto [entry, added] = by_rank.emplace(rank, name);
    require<IoError>(added, folder, "/", name, ": a second file of rank ", rank, " beside ", entry->second,
                     "; the folder holds more than one checkpoint");
  };
  for (const std::string& name : state_files_in(folder)) {
    const std::optional<LayerFileName> layer = parsed_layer(name);
    const std::optional<StateFileName> words = layer ? std::nullopt : parsed(name);
    require_known(cat(folder, "/", name), name, layer || words);
    if (layer) {
      add(layers[layer->layer], layer->model_rank, name);
      continue;
    }
    FilesOfRank& own = ranks[std::stoi(words->model_rank)];
    add(words->optim          ? own.optim
        : words->rank.empty() ? own.whole
                              : own.parts,
        words->rank.empty() ? 0 : std::stoi(words->rank), name);
  }
  if (ranks.empty()) ranks[0];
  SavedFolder result{.model_ranks = {}, .layers = layers_in_order(folder, layers)};
  for (const auto& [rank, own] : ranks) {
    require<IoError>(rank == static_cast<int>(result.model_ranks.size()), folder, ": no file of mp_rank ",
                     result.model_ranks.size(), ", but of mp_rank ", rank, "; every rank's file is needed");
    result.model_ranks.push_back(own.files(folder, rank));
  }
  require<IoError>(result.model_ranks.size() % static_cast<size_t>(result.layer_ranks()) == 0, folder, ": files of ",
                   result.model_ranks.size(), " numbers mp_rank_MM, expected a multiple of the ", result.layer_ranks(),
                   " model-parallel ranks that its layers have files of");
  return result;
}

}  // namespace ds::checkpoint
