#include "model/state/same_on_all_ranks.h"

#include <algorithm>
#include <map>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/agreement.h"
#include "core/check.h"
#include "core/json/json_problems.h"
#include "core/shown_text.h"
#include "core/tensor_check.h"
#include "core/text_hash.h"

namespace ds::engine {
namespace {

constexpr int64_t kNotGiven = -1;
constexpr char kTab = '\t';
constexpr std::string_view kFrozen = "frozen";  // between trainable and frozen parameters
constexpr std::string_view kOfConfig = "ds_config ";

// "what<TAB>value".
struct Line {
  std::string_view what, value;
};

std::vector<Line> lines_of(std::string_view text) {
  std::vector<Line> lines;
  while (!text.empty()) {
    const std::string_view line = text.substr(0, text.find('\n'));
    const size_t tab = std::min(line.find(kTab), line.size());
    lines.push_back({line.substr(0, tab), line.substr(std::min(tab + 1, line.size()))});
    text.remove_prefix(std::min(line.size() + 1, text.size()));
  }
  return lines;
}

std::map<std::string_view, std::string_view> by_name(std::string_view text) {
  std::map<std::string_view, std::string_view> values;
  for (const Line& line : lines_of(text)) values.emplace(line.what, line.value);
  return values;
}

// The first parameter, in the order of the module, that is not the same.
std::string differing_parameter(std::string_view first, std::string_view other, int rank) {
  const std::vector<Line> here = lines_of(first);
  const std::vector<Line> there = lines_of(other);
  const auto name = [](const std::vector<Line>& lines, size_t i) {
    if (i >= lines.size()) return std::string("none");
    return lines[i].what == kFrozen ? std::string("no further trainable one") : shown_text(lines[i].what);
  };
  for (size_t i = 0; i < std::max(here.size(), there.size()); ++i) {
    if (name(here, i) != name(there, i)) {
      return cat("after ", i, " equal ones ", name(here, i), " on rank 0, ", name(there, i), " on rank ", rank);
    }
    if (here[i].value != there[i].value) {
      return cat(name(here, i), ": ", here[i].value, " on rank 0, ", there[i].value, " on rank ", rank);
    }
  }
  return "their order";
}

std::string signature(const zero::Parameter& parameter) {
  return cat(parameter.name, kTab, parameter.tensor.scalar_type(), ' ', parameter.tensor.sizes(), '\n');
}

std::string samples_text(int64_t samples) { return samples == kNotGiven ? "none" : cat(samples, " samples"); }

std::string schedule_text(int64_t given) { return given == 0 ? "none" : "one"; }

}  // namespace

std::string differing_setting(const RankSettings& first, const RankSettings& other) {
  const auto here = by_name(first.lines);
  const auto there = by_name(other.lines);
  const auto value = [](const auto& values, std::string_view what) {
    const auto found = values.find(what);
    return found == values.end() ? std::string("nothing") : shown_text(found->second);
  };
  for (const auto* values : {&here, &there}) {
    for (const auto& entry : *values) {
      const std::string of_first = value(here, entry.first);
      const std::string of_other = value(there, entry.first);
      if (of_first != of_other) {
        return cat(shown_text(entry.first), ": ", of_first, " on ", first.rank, ", ", of_other, " on ", other.rank);
      }
    }
  }
  return "their order";
}

std::string config_lines(const config::DsConfig& config) {
  std::map<std::string, std::string> lines;
  const nlohmann::ordered_json flat = config.text.flatten();
  for (const auto& entry : flat.items()) lines[dotted_path(entry.key())] = entry.value().dump();
  std::string text;
  for (const auto& [path, value] : lines) text += cat(kOfConfig, path, kTab, value, '\n');
  return text;
}

void require_same_on_all_ranks(const ModelParameters& parameters, const std::string& settings,
                               const GivenInputs& inputs, c10::Device device, comm::Communicator& ranks) {
  if (ranks.size() == 1) return;
  std::string text;
  for (const zero::Parameter& parameter : parameters.trainable) text += signature(parameter);
  text += cat(kFrozen, '\n');
  for (const zero::Parameter& parameter : parameters.frozen) text += signature(parameter);
  const std::vector<int64_t> own = {static_cast<int64_t>(fnv1a(settings)), static_cast<int64_t>(fnv1a(text)),
                                    inputs.samples.value_or(kNotGiven), int64_t{inputs.has_schedule}};
  const std::vector<int64_t> all = comm::numbers_of_ranks(ranks, device, own, "hash of config and parameters");
  const auto count = static_cast<int64_t>(own.size());
  const int64_t* const first = all.data();
  // All ranks see the same numbers, so that all of them ask for the texts of the two that differ.
  const auto both = [&](const std::string& of_this, int rank) {
    return std::pair(comm::text_of_rank(of_this, 0, device, ranks), comm::text_of_rank(of_this, rank, device, ranks));
  };
  for (int rank = 1; rank < ranks.size(); ++rank) {
    const auto* const other = first + count * rank;
    // Parameters first: groups of them are among the settings.
    if (other[1] != first[1]) {
      const auto [here, there] = both(text, rank);
      throw CommError(cat("ranks disagree: the parameters (names, shapes, dtypes) of rank ", rank,
                          " differ from those of rank 0: ", differing_parameter(here, there, rank),
                          "; build the same model on every rank (this is rank ", ranks.rank(), ")"));
    }
    if (other[0] != first[0]) {
      const auto [here, there] = both(settings, rank);
      std::string what = differing_setting({"rank 0", here}, {cat("rank ", rank), there});
      const bool of_config = what.starts_with(kOfConfig);
      if (of_config) what.erase(0, kOfConfig.size());
      throw CommError(cat("ranks disagree: the ", of_config ? "ds_config" : "setup", " of rank ", rank,
                          " differs from that of rank 0: ", what, "; start all ranks with the same ",
                          of_config ? std::string("file") : cat("options of ", inputs.call), " (this is rank ",
                          ranks.rank(), ")"));
    }
    require<CommError>(other[2] == first[2], "initialize: .training_data: ranks disagree: expected the same data set ",
                       "on each data-parallel rank, of which the engine gives each its part; found ",
                       samples_text(first[2]), " on rank 0 and ", samples_text(other[2]), " on rank ", rank,
                       " (this is rank ", ranks.rank(), ")");
    require<CommError>(other[3] == first[3],
                       "initialize: .lr_scheduler or .torch_scheduler: ranks disagree: expected one on each ",
                       "data-parallel rank or on none; found ", schedule_text(first[3]), " on rank 0 and ",
                       schedule_text(other[3]), " on rank ", rank, " (this is rank ", ranks.rank(), ")");
  }
}

}  // namespace ds::engine
