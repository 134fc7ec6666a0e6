// How a module is cut: which parameters lie in a bucket, in which dtypes, and what stays whole between forward and
// backward.
#pragma once

#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "config/plan/plan.h"
#include "dsengine/fully_shard.h"
#include "loops/shard_ranks.h"
#include "model/state/model_layout.h"

namespace ds::loops {

// A unit: parameters that are gathered as one.
struct ShardPart {
  std::shared_ptr<torch::nn::Module> module;
  std::optional<bool> reshard_after_forward;
};

struct ShardLayout {
  engine::BucketOptions buckets;  // a part for each unit, and one for the rest, which is cut by itself
  engine::Plan plan;
  at::ScalarType reduce_dtype = at::kFloat;
  std::vector<char> reshards_after_forward;  // by part as `buckets` numbers them
};

// Throws ConfigError for dtypes that do not go together, naming a parameter.
ShardLayout shard_layout(const engine::ModelParameters& parameters, const std::vector<ShardPart>& parts,
                         const FullyShardOptions& options, const ShardRanks& ranks);

// reshard_after_forward, whatever name it was given by; empty: it is not said.
std::optional<bool> reshards_after_forward(const FullyShardOptions& options);

// What has to be the same on every rank: lines "what<TAB>value". `without_values`: tensors on the meta device.
std::string settings_text(const FullyShardOptions& options, size_t parts, size_t without_values);

}  // namespace ds::loops
