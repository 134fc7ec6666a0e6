// From the config's optimizer section to an optimizer over the buckets.
#pragma once

#include <memory>
#include <vector>

#include "dsengine/comm.h"
#include "dsengine/config.h"
#include "dsengine/initialize.h"
#include "engine/offloaded/offloaded_state.h"
#include "engine/state/model_layout.h"
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

// float32 tensors of optimizer state that a bucket has.
int64_t state_tensors(const config::OptimizerSection& section, const zero::BucketLayout& bucket,
                      const std::vector<ParameterInfo>& infos);

// The optimizer with one slice per bucket. `infos` outlives it. Some of its states live in `offloaded`
// (may be null).
std::shared_ptr<optimizers::ShardOptimizer> build_optimizer(const config::OptimizerSection& section,
                                                            const OptimizerGroups& groups,
                                                            const std::vector<zero::ParameterBucket>& buckets,
                                                            const std::vector<at::Tensor>& masters,
                                                            const std::vector<ParameterInfo>& infos, bool partition,
                                                            comm::Communicator& communicator,
                                                            OffloadedState* offloaded);

}  // namespace ds::engine
