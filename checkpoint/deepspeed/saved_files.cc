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

void refuse_model_parts(const std::string& path, const std::string& name, const std::string& model_rank) {
  require<IoError>(name.find("expert_") == std::string::npos && !name.starts_with("expp_"), path,
                   ": of a model with experts; only checkpoints without experts can be read");
  require<IoError>(!name.starts_with("layer_"), path,
                   ": of a pipeline; only checkpoints of one pipeline stage can be read");
  require<IoError>(!model_rank.empty(), path,
                   ": not a file name of DeepSpeed's ZeRO checkpoints, which are "
                   "[zero_pp_rank_R_]mp_rank_00_model_states.pt and [bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt");
  require<IoError>(std::stoi(model_rank) == 0, path,
                   ": of a model-parallel rank; only checkpoints with one (mp_rank_00) can be read");
}

}  // namespace

bool holds_deepspeed_files(const std::string& folder) { return !state_files_in(folder).empty(); }

SavedFiles find_saved_files(const std::string& folder) {
  std::map<int, std::string> whole, parts, optim;
  for (const std::string& name : state_files_in(folder)) {
    const std::string path = cat(folder, "/", name);
    const std::optional<StateFileName> words = parsed(name);
    refuse_model_parts(path, name, words ? words->model_rank : std::string());
    const int rank = words->rank.empty() ? 0 : std::stoi(words->rank);
    std::map<int, std::string>& kind = words->optim ? optim : words->rank.empty() ? whole : parts;
    const auto [entry, added] = kind.emplace(rank, name);
    require<IoError>(added, path, ": a second file of rank ", rank, " beside ", entry->second,
                     "; the folder holds more than one checkpoint");
  }
  require<IoError>(whole.empty() || parts.empty(), folder, ": both ", whole.empty() ? "" : whole.begin()->second,
                   " and files of a partitioned model; the folder holds more than one checkpoint");
  SavedFiles files{.folder = folder, .model_states = {}, .optim_states = {}, .partitioned_model = !parts.empty()};
  files.model_states = in_order(folder, parts.empty() ? whole : parts, "model_states.pt");
  files.optim_states = in_order(folder, optim, "optim_states.pt");
  require<IoError>(!files.model_states.empty(), folder,
                   ": no mp_rank_00_model_states.pt and no zero_pp_rank_0_mp_rank_00_model_states.pt");
  return files;
}

}  // namespace ds::checkpoint
