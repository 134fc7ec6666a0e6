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
#include "loops/gather_control.h"
#include "loops/renormed_tables.h"
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
  // `units`: the units inside of the module, in the order in which they take their parameters; `earlier`: the units
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
  // The control of when parameters are full; not for a model that has ended.
  GatherControl& gathers() { return *gathers_; }
  // Says whether the passes that come reduce their gradients.
  void set_gradient_sync(bool on) { sync_ = on; }

  // Ends the model: parameters cannot be read any more; state() keeps its slices. Collective.
  void end_as_unit();
  // Whether parameters were on the meta device, and nobody has looked whether they have got values since.
  bool awaits_values() const { return awaits_values_; }
  // Called before anything that reads or changes slices: waits for gathers under way and throws what failed in them,
  // and has slices take over what the program has changed in place. Throws UsageError while a pass runs, and for a
  // model that has ended.
  void require_between_passes(const char* call);
  // Sets the optimizer whose states are in checkpoints; none but while one is written or read.
  void set_optimizer(engine::ModelOptimizer optimizer) { state_.optimizer = std::move(optimizer); }

 private:
  void lay_out(const engine::ModelParameters& parameters, const std::vector<LayoutUnit>& units, EarlierUnits& earlier);
  void make_parts(at::ScalarType reduce_dtype);
  void end();
  void watch_slices();
  void begin_pass();
  void end_pass();
  void abandon_pass() noexcept;
  void before_operator(const at::Tensor& tensor);
  void slice_changes(size_t bucket);

  FullyShardOptions options_;
  ShardRanks ranks_;
  SliceGradients gradients_;
  engine::ModelState state_;
  bool awaits_values_ = false;
  std::vector<SliceLeaf> leaves_;
  // The group of BatchNorm layers that were converted without one; null: none were.
  std::shared_ptr<comm::Communicator> norms_;
  std::optional<GatherControl> gathers_;                     // nothing once the model has ended
  std::unordered_map<const void*, size_t> bucket_of_slice_;  // by storage
  std::unordered_map<const void*, size_t> bucket_of_parameters_;
  std::optional<SharedLookups> lookups_;  // tables with max_norm; nothing with one rank
  std::optional<GradientMarks> marks_;    // nothing once the model has ended
  bool sync_ = true;
  bool sync_in_pass_ = true;
  std::unique_ptr<BackwardPass> pass_;
  std::unique_ptr<OpInterceptor> watch_;
};

}  // namespace ds::loops
