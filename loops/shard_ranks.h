// The ranks that a sharded module talks with, also where parallelize_module has split it over a tensor axis: 2-D
// parallelism, in which each rank has slices of its parts of the parameters.
#pragma once

#include <c10/core/Device.h>
#include <torch/nn/module.h>

#include <memory>
#include <string>

#include "dsengine/comm.h"
#include "dsengine/fully_shard.h"
#include "model/state/ranks.h"
#include "model/state/tensor_parts.h"
#include "parallel/axis/axis.h"

namespace ds::loops {

struct ShardRanks {
  std::shared_ptr<comm::Communicator> all;       // data-parallel ranks: each has batches of its own
  std::shared_ptr<comm::Communicator> shards;    // each has a slice
  std::shared_ptr<comm::Communicator> replicas;  // the ranks with the same slice; null: there is one copy
  std::shared_ptr<comm::Communicator>
      tensor;  // the ranks with parts of the same parameters; null: parameters are not split
  std::shared_ptr<comm::Communicator> world;  // `all` of every rank of `tensor`
  c10::Device device = c10::kCPU;
};

// Makes the groups from the mesh, the group or the job, as the options say. `device`: where the parameters are.
// `tensor`: the ranks that they are split over, null: they are not split. Throws ConfigError for options that exclude
// each other, and for a mesh that does not have the ranks of `tensor` along its innermost axis. Collective.
ShardRanks shard_ranks(const FullyShardOptions& options, c10::Device device, const comm::Communicator* tensor);

// HYBRID_SHARD without a mesh: shards inside of hosts with so many consecutive ranks each, copies over the hosts.
// Throws ConfigError where hosts are not like that. Collective.
void shard_inside_hosts(ShardRanks& ranks, int ranks_per_host);

// Makes the ranks in the form of model/state, with a group for gathers alone. Collective.
engine::Ranks engine_ranks(const ShardRanks& ranks);

// Finds the ranks of a module, as shard_ranks() does. Throws UsageError for one without parameters, ConfigError for
// options that a split one does not take. Collective.
ShardRanks ranks_of(const torch::nn::Module& module, const FullyShardOptions& options);

// The axis of a module's split parameters; null: none is split. Throws UsageError, naming two, where there are several.
std::shared_ptr<parallel::Axis> tensor_axis_of(const torch::nn::Module& module);

// Makes the parts of the split parameters that each rank of the tensor axis has; null without an axis.
std::unique_ptr<engine::TensorParts> tensor_parts_of(const torch::nn::Module& module, const ShardRanks& ranks);

// How each parameter is cut, which is the same on all ranks of the axis: lines "what<TAB>value". Empty without an axis.
std::string split_text(const torch::nn::Module& module);

}  // namespace ds::loops
