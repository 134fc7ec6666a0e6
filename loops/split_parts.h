// A module that parallelize_module has split over a tensor axis, as what shards its leaves has to know it: 2-D
// parallelism, in which each rank has slices of its parts.
#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <string>

#include "loops/shard_ranks.h"
#include "model/state/tensor_parts.h"
#include "parallel/axis/axis.h"

namespace ds::loops {

// The ranks of a module, as shard_ranks() says them. Throws UsageError for one without parameters, ConfigError for
// options that a split one does not take. Collective.
ShardRanks ranks_of(const torch::nn::Module& module, const FullyShardOptions& options);

// The axis of a module's split parameters; null: none is split. Throws UsageError, naming two, where there are several.
std::shared_ptr<parallel::Axis> tensor_axis_of(const torch::nn::Module& module);

// Null without an axis.
std::unique_ptr<engine::TensorParts> tensor_parts_of(const torch::nn::Module& module, const ShardRanks& ranks);

// How each parameter is cut, which is the same on all ranks of the axis: lines "what<TAB>value". Empty without an axis.
std::string split_text(const torch::nn::Module& module);

}  // namespace ds::loops
