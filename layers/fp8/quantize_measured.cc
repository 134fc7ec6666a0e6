#include "layers/fp8/quantize_measured.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include "layers/fp8/quantize_on_device.h"

namespace ds::fp8 {

at::Tensor chosen_scale(const ScaleChoice& choice, const at::Tensor& amax, at::ScalarType format) {
  at::Tensor own = scale_for(amax, format, choice.margin);
  if (!choice.stored.defined()) return own;
  const at::Tensor& stored = choice.stored;
  at::Tensor usable = stored.gt(0);
  if (choice.covers) usable.logical_and_((stored * amax).le(largest_of(format)));
  return at::where(usable, stored, own);
}

Measured quantize_measured(const at::Tensor& values, at::ScalarType format, const ScaleChoice& choice) {
  if (quantize_kernels_take(values)) return measured_on_device(values, format, choice);
  return quantize_measured_by_operators(values, format, choice);
}

Measured quantize_measured_by_operators(const at::Tensor& values, at::ScalarType format, const ScaleChoice& choice) {
  const at::Tensor amax = amax_of(values);
  const at::Tensor scale = chosen_scale(choice, amax, format);
  if (choice.record.defined()) {
    // A tensor that is not finite says nothing of the next step's.
    const at::Tensor finite = at::where(amax.isfinite(), amax, at::zeros_like(amax));
    choice.record.copy_(at::maximum(choice.record, finite));
  }
  return {quantize(values, format, scale, amax), amax};
}

}  // namespace ds::fp8
