// Makes rules, with patterns of names, out of what was decided for each parameter: one rule for all names that differ
// in numbers alone. Pure, torch-free.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "dsengine/split_plan.h"

namespace ds::engine {

// How one parameter is cut, and who says so.
struct SplitDecision {
  parallel::Style style = parallel::Style::kColumn;
  std::optional<int64_t> dim = std::nullopt;
  std::vector<int64_t> blocks;  // empty: one
  int64_t grain = 1;
  std::string origin;
  bool join_output = false;
};

// Writes "h.12.attn.w1" as "h.*.attn.w1": without numbers by themselves, in which parameters of equal layers differ.
std::string without_numbers(const std::string& name);

// Makes the rules, in the order of `parameters`. A rule's pattern has \d+ for numbers where all parameters that it
// matches are cut alike; else each has a rule of its own. A parameter that is not in `decisions` gets none.
std::vector<parallel::SplitRule> rules_by_name(const std::vector<parallel::NamedShape>& parameters,
                                               const std::unordered_map<std::string, SplitDecision>& decisions);

}  // namespace ds::engine
