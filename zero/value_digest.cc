#include "zero/value_digest.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/nan_to_num.h>
#include <ATen/ops/stack.h>

#include <string_view>

#include "core/text.h"
#include "core/text_hash.h"

namespace ds::zero {

namespace {

at::Tensor sample_of(const at::Tensor& values) {
  constexpr int64_t kMost = 1024;
  const at::Tensor flat = values.detach().reshape({-1});
  return flat.numel() > kMost ? flat.slice(0, 0, flat.numel(), flat.numel() / kMost) : flat;
}

}  // namespace

uint64_t digest_of(const at::Tensor& values) {
  const at::NoGradGuard no_grad;
  const at::Tensor sample = sample_of(values).to(at::kCPU).contiguous();
  const std::string_view bytes(static_cast<const char*>(sample.const_data_ptr()), sample.nbytes());
  return fnv1a(cat(c10::toString(values.scalar_type()), values.sizes(), bytes));
}

at::Tensor device_digest_of(const at::Tensor& integers) {
  const at::NoGradGuard no_grad;
  const at::Tensor sample = sample_of(integers).to(at::kLong);
  // Odd factors, other ones for each place.
  const at::Tensor factors = at::arange(sample.numel(), sample.options()) * int64_t{0x5851F42D4C957F2E} + 1;
  return ((sample + 1) * factors).sum();
}

at::Tensor device_projection_of(const at::Tensor& values) {
  const at::NoGradGuard no_grad;
  const at::Tensor sample = sample_of(values).to(at::kDouble).nan_to_num(/*nan=*/2, /*posinf=*/1, /*neginf=*/-1);
  // The sines of squares are a chirp, which has all frequencies, so that smooth values in another order have another
  // projection.
  constexpr double kFrequency = 2.399963;
  const at::Tensor weights = at::arange(1, sample.numel() + 1, sample.options()).square_().mul_(kFrequency).sin_();
  const at::Tensor magnitude = sample.abs().sum().clamp_min(1e-6);  // less counts as zeros
  return (sample * weights).sum() / magnitude + (magnitude / static_cast<double>(sample.numel())).log();
}

at::Tensor device_sums_of(const at::Tensor& numbers) {
  const at::NoGradGuard no_grad;
  const at::Tensor sample = sample_of(numbers).to(at::kDouble);
  const at::Tensor weighted = sample * at::arange(1, sample.numel() + 1, sample.options());
  return at::stack({weighted.sum(), weighted.abs().sum()});
}

}  // namespace ds::zero
