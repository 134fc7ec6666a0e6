// How a module is sharded: which parameters lie in a bucket, in which dtypes, what stays in memory between forward and
// backward, and where slices are kept.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "config/plan/plan.h"
#include "core/slices/slice_store.h"
#include "dsengine/fully_shard.h"
#include "loops/shard_ranks.h"
#include "model/state/model_layout.h"

namespace ds::loops {

// A unit of the layout: a module whose parameters are gathered as one.
struct LayoutUnit {
  std::shared_ptr<torch::nn::Module> module;
  std::optional<bool> reshard_after_forward;
};

// How the parameters of a sharded module are laid out, gathered and reduced.
struct ShardLayout {
  engine::BucketOptions buckets;  // a part for each unit, and one for the rest, which is cut by itself
  engine::Plan plan;
  at::ScalarType reduce_dtype = at::kFloat;
  std::vector<char> reshards_after_forward;  // by part as `buckets` numbers them
};

// Lays the parameters out into buckets. Throws ConfigError for dtypes that do not go together, naming a parameter.
ShardLayout shard_layout(const engine::ModelParameters& parameters, const std::vector<LayoutUnit>& units,
                         const FullyShardOptions& options, const ShardRanks& ranks);

// The option reshard_after_forward, by whichever name it was given; nothing: it was not.
std::optional<bool> reshards_after_forward(const FullyShardOptions& options);

// The settings that have to be the same on every rank, as lines "what<TAB>value". `without_values`: tensors on the meta
// device.
std::string settings_text(const FullyShardOptions& options, size_t units, size_t without_values);

// The slice of one bucket, made anew from its master for each gather: in another dtype, or beside the host's. Between
// two uses the slice has no memory, as in FSDP2: the master is all that a rank holds, and whatever an optimizer has
// made of it is what the next gather brings.
class CastSlices final : public SliceStore {
 public:
  explicit CastSlices(at::Tensor master) : master_(std::move(master)) {}

  at::Tensor allocate(int64_t numel, at::ScalarType dtype) override;
  void load(const at::Tensor& slice) override;
  // Elements that were changed go to the master; the others keep its precision.
  void unload(const at::Tensor& slice, bool changed) override;

 private:
  at::Tensor master_;
  int uses_ = 0;
  bool made_ = false;  // the first elements come from the master itself
};

// Slices in host memory that are their own masters.
class HostSlices final : public SliceStore {
 public:
  explicit HostSlices(bool pinned) : pinned_(pinned) {}
  at::Tensor allocate(int64_t numel, at::ScalarType dtype) override;

 private:
  bool pinned_;
};

}  // namespace ds::loops
