// Makes the optimizer of an engine from the config's optimizer section and the program's parameter groups, with a slice
// for each bucket. The object itself comes from optim/optimizer_factory.h or compression/compressed_factory.h. An
// optimizer that the program brings is set up in client_setup.h.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "dsengine/config.h"
#include "dsengine/initialize.h"
#include "model/state/model_layout.h"
#include "model/state/model_state.h"
#include "optim/shard_optimizer.h"

namespace ds::engine {

// The parameter groups of an optimizer, which have hyperparameters of their own.
struct OptimizerGroups {
  std::vector<optimizers::GroupOptions> options;  // by group
  std::vector<int> group_of;                      // the group of each trainable parameter
  std::vector<at::Tensor> masks;                  // ParameterGroup::exp_avg_mask of each group; undefined: none
};

// Describes what ranks have to bring alike of the groups of an optimizer, as lines "what<TAB>value".
std::string group_lines(const std::vector<optimizers::GroupOptions>& groups);

// Assigns every trainable parameter to a group. Group 0 has the config's values, and group i + 1 has those that
// `groups[i]` sets. For Muon every group is split in two: matrices that Muon updates, and the rest with AdamW's values
// (see optimizers::uses_muon). Groups without parameters are kept, so that indices stay those of the program. Throws
// UsageError for a name that matches no parameter, and for a parameter that two groups claim. `stages`: the ranks of a
// pipeline of several stages, among which a name has to match somewhere; all of them call it and throw together. Null:
// this rank has all parameters.
OptimizerGroups plan_groups(const config::OptimizerSection& section, const ModelParameters& parameters,
                            const std::vector<ParameterGroup>& groups, const Ranks* stages);

// Gives the optimizer a slice for each bucket. States live where `model` offloads them. `writes`: they begin
// with other values than zeros, so that their memory has to be there meanwhile.
void add_slices(optimizers::SliceOptimizer& optimizer, const ModelState& model, bool writes);

// Makes the optimizer, with one slice for each bucket. `model`, which has its masters and buckets, outlives it.
std::shared_ptr<optimizers::SliceOptimizer> build_optimizer(const ModelState& model,
                                                            const config::OptimizerSection& section,
                                                            const OptimizerGroups& groups);

}  // namespace ds::engine
