#include <ATen/TensorOperators.h>

#include <cmath>
#include <utility>

#include "core/check.h"
#include "core/random_streams.h"
#include "core/replay/replayed_values.h"
#include "core/tensor_check.h"
#include "dsengine/efficiency.h"

namespace ds::efficiency {
namespace {

// In [0, 1), 53 bits.
double uniform_of(const RandomStream& stream) { return static_cast<double>(key_of(stream) >> 11U) * 0x1p-53; }

}  // namespace

ProgressiveLayerDrop::ProgressiveLayerDrop(double theta, double gamma, uint64_t seed, TrainingStateSource state)
    : theta_(theta), gamma_(gamma), seed_(seed), state_(std::move(state)) {
  require(theta > 0 && theta <= 1, "progressive_layer_drop: theta: expected a number in (0, 1], found ", theta);
  require(gamma >= 0, "progressive_layer_drop: gamma: expected a number >= 0, found ", gamma);
}

double ProgressiveLayerDrop::theta_at(int64_t steps) const {
  return (1 - theta_) * std::exp(-gamma_ * static_cast<double>(steps)) + theta_;
}

double ProgressiveLayerDrop::theta() const { return theta_at(state_().optimizer_steps); }

double ProgressiveLayerDrop::keep_probability_at(int64_t layer, int64_t layers, int64_t steps) const {
  require(layer >= 0 && layer < layers, "progressive_layer_drop: layer: expected one of 0 to ", layers - 1, ", found ",
          layer);
  return 1 - static_cast<double>(layer) / static_cast<double>(layers) * (1 - theta_at(steps));
}

double ProgressiveLayerDrop::keep_probability(int64_t layer, int64_t layers) const {
  return keep_probability_at(layer, layers, state_().optimizer_steps);
}

at::Tensor ProgressiveLayerDrop::operator()(int64_t layer, int64_t layers, const at::Tensor& x,
                                            const std::function<at::Tensor(const at::Tensor&)>& function) {
  if (theta_ == 1) return function(x);
  // All that decides is what it was when the region around it ran first, whatever the program has done since.
  if (ReplayTape::replayed([&] { return static_cast<int64_t>(state_().training); }) == 0) return function(x);
  const int64_t step = ReplayTape::replayed([&] { return state_().optimizer_steps; });
  const double keep = keep_probability_at(layer, layers, step);
  const int64_t run = ReplayTape::replayed([&] { return runs_.next(layer, state_()); });
  const double drawn = uniform_of(
      {.seed = seed_, .step = step, .micro_batch = run, .purpose = "progressive layer drop", .coordinates = {layer}});
  if (drawn >= keep) return x;
  at::Tensor out = function(x);
  require(out.defined() && out.sizes() == x.sizes() && out.scalar_type() == x.scalar_type(),
          "progressive_layer_drop: layer ", layer, ": expected a result of its input's shape and dtype, ", describe(x),
          ", found ", describe(out), "; a layer that changes them cannot be left out");
  return keep == 1 ? out : x + (out - x) / keep;
}

}  // namespace ds::efficiency
