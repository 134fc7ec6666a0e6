// A module whose parameters are slices on the ranks, with the parts that an engine has at stage 3, driven by the
// program's own backward passes.
//
// Gathers and reductions are zero's, the layout and the saved files are those of model/state and model/checkpoint.
// ShardedModel tells them what happens: a pass begins with its first gradient and ends with autograd's callback
// (loops/backward_pass.h); an optimizer's step is an operator that changes a slice.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/op_interceptor.h"
#include "dsengine/fully_shard.h"
#include "loops/backward_pass.h"
#include "loops/first_values.h"
#include "loops/shard_layout.h"
#include "loops/shard_ranks.h"
#include "loops/slice_leaves.h"
#include "model/state/model_layout.h"
#include "model/state/model_state.h"

namespace ds::loops {

// A module with sharded parameters. Used on the thread that made it, but for what autograd's threads call in a backward
// pass.
class ShardedModel {
 public:
  // `units`: those inside of the module, in the order in which they take their parameters; `earlier`: those of them
  // that have been sharded by themselves. Collective.
  ShardedModel(const std::shared_ptr<torch::nn::Module>& module, const FullyShardOptions& options,
               const std::vector<LayoutUnit>& units, EarlierUnits& earlier);
  ~ShardedModel();
  ShardedModel(const ShardedModel&) = delete;
  ShardedModel& operator=(const ShardedModel&) = delete;

  const engine::ModelState& state() const { return state_; }
  const std::vector<SliceLeaf>& leaves() const { return leaves_; }
  const FullyShardOptions& options() const { return options_; }
  const ShardRanks& ranks() const { return ranks_; }
  // The buckets with parameters of a module; all of them for the outermost one. Frozen ones come last.
  std::vector<size_t> buckets_of(const torch::nn::Module& module) const;

  void unshard(const std::vector<size_t>& buckets);
  void reshard(const std::vector<size_t>& buckets);
  void set_gradient_sync(bool on);
  void set_reshard_after_backward(const std::vector<size_t>& buckets, bool on);
  void set_reshard_after_forward(const std::vector<size_t>& buckets, bool on);
  void prefetch(const std::vector<size_t>& when, const std::vector<size_t>& buckets, bool in_backward);
  zero::HeldBytes held_bytes() const;

  // Ends the model: parameters cannot be read any more; state() keeps its slices. Collective.
  void end_as_unit();
  bool ended() const { return !pass_; }
  // Whether parameters were on the meta device, and nobody has looked whether they have got values since.
  bool awaits_values() const { return awaits_values_; }
  // Called before anything that reads or changes slices: waits for gathers under way and throws what failed in them.
  // Throws UsageError while a pass runs, and for a model that has ended.
  void require_between_passes(const char* call) const;
  // Sets the optimizer whose states are in checkpoints; none but while one is written or read.
  void set_optimizer(engine::ModelOptimizer optimizer) { state_.optimizer = std::move(optimizer); }
  // Notes that the parameters have new values, by anything else than the model's own backward passes.
  void slices_changed();

 private:
  void lay_out(const engine::ModelParameters& parameters, const std::vector<LayoutUnit>& units, EarlierUnits& earlier);
  void make_parts(at::ScalarType reduce_dtype);
  void end();
  void watch_slices();
  void require_same_parameters() const;
  void begin_pass();
  void end_pass();
  void add_up_summed();
  void abandon_pass() noexcept;
  void before_operator(const at::Tensor& tensor);
  void slice_changes(size_t bucket);
  void drop_hold(size_t bucket);
  void mark_parameters();
  void unmark_parameters();
  size_t all_buckets() const { return state_.buckets.size() + state_.frozen_buckets.size(); }

  FullyShardOptions options_;
  ShardRanks ranks_;
  SliceGradients gradients_;
  engine::ModelState state_;
  bool awaits_values_ = false;
  std::vector<SliceLeaf> leaves_;
  std::shared_ptr<comm::Communicator>
      norms_;  // the group of BatchNorm layers that were converted without one; null: none
  std::vector<char> reshards_after_backward_;  // a flag for each bucket
  std::vector<char> held_;                     // by unshard()
  zero::PrefetchRules prefetch_;
  std::unordered_map<const void*, size_t> bucket_of_slice_;  // by storage
  std::unordered_map<const void*, size_t> bucket_of_parameters_;
  std::vector<at::Tensor> marks_;                            // gradients of the module's own parameters, between passes
  std::vector<std::pair<at::Tensor, unsigned>> leaf_hooks_;  // hooks that take marks away before autograd adds to them
  bool sync_ = true;
  bool sync_in_pass_ = true;
  std::unique_ptr<BackwardPass> pass_;
  std::unique_ptr<OpInterceptor> watch_;
};

}  // namespace ds::loops
