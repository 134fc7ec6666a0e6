// The cuts of a model that a tensor_parallel section asks for: names and sizes of its parameters to rules. Pure,
// torch-free.
//
//   const SplitRules split = split_rules(config.tensor_parallel, shapes);
//   for (const std::string& warning : split.warnings) log::warn(warning);
//   const parallel::SplitPlan plan = parallel::plan_splits(shapes, split.rules, ranks);
//
// In DeepSpeed's order: the entries of partition_config, then (unless use_default_specs is off) of preset_model;
// partition_config.tp_plan, a Hugging Face model's; the vocabulary; and where none of these names layers,
// injection_policy_tuple, else what layers are usually called (config/split/layer_names.h). What nothing names stays
// whole. A bias goes the way of its weight.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "dsengine/config_zero.h"
#include "dsengine/split_plan.h"

namespace ds::engine {

struct SplitRules {
  // Each matches some of `parameters`, by the parameters' names, and has an origin.
  std::vector<parallel::SplitRule> rules;
  // Warnings about requests of the section without effect, and about cuts that may go through heads.
  std::vector<std::string> warnings;
};

// The message for a model of which nothing is split over the `ranks` of its tensor axis: what to write in the config.
std::string nothing_is_split(int64_t ranks);

// `parameters`: of the whole model, tied ones under each of their names; none: no rules. Throws ConfigError with the
// json path for what makes no sense: patterns that are none, shapes that a weight does not have, styles that are not
// known, an index that is out of range, and with strict_mode matrices that nothing names.
SplitRules split_rules(const config::TensorParallelSection& section,
                       const std::vector<parallel::NamedShape>& parameters);

}  // namespace ds::engine
