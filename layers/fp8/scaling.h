// Scales of the FP8 layers of one model: a recipe, and what it remembers from step to step.
//
// Delayed scaling, as Transformer Engine's: a tensor's scale comes from the largest magnitudes ("amax") of steps
// before, so that quantising is one pass. Here an entry of the history is an optimizer step, over its micro-batches and
// all ranks that have the layer or a part of it, so that all micro-batches of a step, and what is computed again for
// backward, have one scale. A tensor without a history is scaled by itself, where Transformer Engine begins with 1.
//
// Over a tensor axis ranks have parts of a layer's tensors, whose scale is that of the full tensor: ranks share the
// amax of a step, once a step that of each weight at hand, and before the first step that of each tensor.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "dsengine/comm.h"
#include "layers/fp8/product.h"

namespace ds::fp8 {

enum class Recipe { kDelayed, kCurrent };

struct ScalingOptions {
  Recipe recipe = Recipe::kDelayed;
  bool blocks = false;               // scales of 1 x 128 and 128 x 128 elements; current scaling only
  at::ScalarType gradients = kE5M2;  // all else is E4M3
  int64_t history = 1024;            // steps that a scale looks back at
  bool most_recent = false;          // at the last one alone
  int64_t margin = 0;                // scales are smaller by 2^margin
  bool weight_gradients = false;     // on FP8, too
  Arithmetic arithmetic = Arithmetic::kHardware;
};

// The tensors of a layer that are quantised.
enum class Kind { kInput, kWeight, kGradient };
inline constexpr int64_t kKinds = 3;

// Any thread: forward and backward may be on different ones. Without layers nothing happens in a call, and no
// collective.
class Scaling {
 public:
  // Layers by their names, in the model's order; their tensors are on `device`.
  Scaling(const ScalingOptions& options, std::vector<std::string> layers, c10::Device device);

  // The ranks of `axis` have parts of these layers, one flag each. For one of them quantized() is collective over the
  // axis: for a weight in the first call with scales that are new, for all else in each call until the first
  // end_step(), or after forget(). With delayed scaling alone.
  void share_parts(std::shared_ptr<comm::Communicator> axis, std::vector<char> layers);

  const ScalingOptions& options() const { return options_; }
  const std::vector<std::string>& layers() const { return layers_; }
  at::ScalarType format_of(Kind kind) const { return kind == Kind::kGradient ? options_.gradients : kE4M3; }

  // The number of the scales in force, and these: float32 [layers, 3], 0 where there is none. Old ones stay for a while
  // for what is computed again. Throws UsageError for those that have gone.
  int64_t generation() const;
  at::Tensor scales(int64_t generation) const;

  // A matrix with one scale: that of `scales`, else its own. A weight whose largest is beyond what the scale takes has
  // its own, too: an update or a program may have changed it. The parts of a weight have the scale of the full one,
  // chosen once for these `scales`; a part that a program has changed since, beyond that, has its own. `records`: its
  // amax counts for later steps.
  Quantized quantized(const at::Tensor& values, int64_t layer, Kind kind, const at::Tensor& scales, bool records);

  // A layer is computed. The end of a step tells, in the log of rank 0 of its ranks, of layers that never were on that
  // rank, or that are no longer; of each once.
  void note_use(int64_t layer);

  // After an optimizer step: scales of the next one. Collective over `ranks`, all of which get the same. `skip`
  // (undefined: 0): float32 [1] on the device, 1 of a step that was skipped, which leaves history and scales as they
  // are; the host, when it learns of it, calls take_back_step(), before the next end_step().
  void end_step(comm::Communicator& ranks, const at::Tensor& skip = {});
  void take_back_step();
  // In place of end_step(): what was recorded since the last one is of a step that has not been.
  void drop_step();
  // The gradients that come are `factor` times as large as they were, float32 [] or [1]: another loss scale.
  void gradients_scaled(const at::Tensor& factor);
  void gradients_scaled(double factor);

  // The values that a checkpoint keeps of a layer: float32 [3, history + 1], amax of steps from the oldest on, then the
  // scale. take() also takes longer and shorter histories.
  at::Tensor memory(int64_t layer) const;
  void take(int64_t layer, const at::Tensor& memory);
  // All scales begin anew.
  void forget();

 private:
  at::Tensor weight_scale(const at::Tensor& values, int64_t layer, const at::Tensor& scales);
  void tell_of_unused(int rank);
  at::Tensor scales_from(const at::Tensor& amax, const at::Tensor& before) const;

  const ScalingOptions options_;
  const std::vector<std::string> layers_;
  mutable std::mutex mutex_;
  at::Tensor amax_;                // float32 [layers, 3], of the running step
  at::Tensor history_;             // float32 [history, layers, 3], a ring
  int64_t next_ = 0;               // the entry of the ring that is written next
  std::deque<at::Tensor> scales_;  // the last one is in force
  int64_t first_generation_ = 0;   // that of the first of them
  std::vector<char> used_;         // of each layer: it has been computed in the running step
  std::vector<char> told_;         // of each layer: that it is not
  bool first_step_is_over_ = false;
  bool has_history_ = false;                  // scales may be in force, on all ranks alike
  std::shared_ptr<comm::Communicator> axis_;  // null: layers are whole
  std::vector<char> parts_;                   // of each layer: ranks of the axis have parts of it
  // The scale of a weight in parts, and the scales of the step for which it was chosen.
  struct WeightScale {
    at::Tensor chosen_for, scale;
  };
  std::vector<WeightScale> weight_scales_;  // of each layer
};

// Returns the scales of a model that computes no layer on FP8.
std::shared_ptr<Scaling> scaling_without_layers();

}  // namespace ds::fp8
