// The optimizer's step on this rank's parts of buckets, one after the other, for the paths of an update.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>

#include "engine/update/update.h"
#include "optim/step_scale.h"

namespace ds::engine {

// `gradient_scale`: the factor of begin() in all calls of one step.
class SliceSteps {
 public:
  explicit SliceSteps(const UpdateParts& parts) : state_(parts.state), order_(parts.order) {}

  // The factor by which the optimizer multiplies gradients that a step multiplies by `gradient_scale`.
  double factor(double gradient_scale) const;
  // All buckets whose optimizer is on the device, together. Only an optimizer that takes it gets a scale of the device.
  void all_on_device(const optimizers::StepScale& scale);
  // All others, one by one.
  void all_on_host(double gradient_scale);
  // gradient_clip_by_value, on a gradient that the update will multiply by `scale`.
  void clip_by_value(const at::Tensor& gradient, const optimizers::StepScale& scale) const;
  // New weights, on the host, of a bucket whose master is updated.
  void publish(size_t bucket, const at::Tensor& weights);

 private:
  using UpdateInto = std::function<void(const at::Tensor& gradient, const at::Tensor& own)>;
  // Clips the gradient by value and updates the bucket; `update_into` where its master is not what the model has.
  void update(size_t bucket, double gradient_scale, const UpdateInto& update_into);
  void on_device(size_t bucket, const optimizers::StepScale& scale);
  void on_host(size_t bucket, double gradient_scale);

  ModelState& state_;
  CallOrder& order_;
};

}  // namespace ds::engine
