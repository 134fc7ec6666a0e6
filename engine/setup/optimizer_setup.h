// From the config's optimizer section to an optimizer over the buckets.
#pragma once

#include <memory>
#include <vector>

#include "dsengine/config.h"
#include "dsengine/initialize.h"
#include "model/state/model_layout.h"
#include "model/state/model_state.h"
#include "optim/shard_optimizer.h"

namespace ds::engine {

// Hyper-parameter groups of an optimizer and the group of every trainable parameter.
struct OptimizerGroups {
  std::vector<optimizers::GroupOptions> options;
  std::vector<int> group_of;      // by parameter
  std::vector<at::Tensor> masks;  // by group, exp_avg_mask; undefined: none
};

// Group 0 has the config's values, group i + 1 those of `groups[i]` where set. For Muon every group is split in two:
// matrices that Muon updates, and the rest with AdamW's values (see optimizers::uses_muon). Groups without parameters
// are kept, so that indices stay those of the program. Throws UsageError as assign_groups.
OptimizerGroups plan_groups(const config::OptimizerSection& section, const ModelParameters& parameters,
                            const std::vector<ParameterGroup>& groups, bool part_of_model);

// Gives the optimizer a slice for each bucket. Their states live where `model` has offloaded them. `writes`: making
// them touches them.
void add_slices(optimizers::SliceOptimizer& optimizer, const ModelState& model, bool writes);

// The optimizer with one slice per bucket. `model`, which has its masters and buckets, outlives it.
std::shared_ptr<optimizers::SliceOptimizer> build_optimizer(const ModelState& model,
                                                            const config::OptimizerSection& section,
                                                            const OptimizerGroups& groups);

}  // namespace ds::engine
