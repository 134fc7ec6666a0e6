#include "zero/value_digest.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/nan_to_num.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/stack.h>

#include <cstring>
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

// Sums words of eight bytes, each times an odd factor of its place.
int64_t checksum_on_host(const at::Tensor& flat) {
  constexpr uint64_t kFactor = 2 * uint64_t{0x9E3779B97F4A7C15};
  const auto* const bytes = static_cast<const char*>(flat.const_data_ptr());
  const size_t whole = flat.nbytes() / sizeof(uint64_t);
  uint64_t sum = 0;
  for (size_t i = 0; i < whole; ++i) {
    uint64_t word = 0;
    std::memcpy(&word, bytes + i * sizeof(word), sizeof(word));
    sum += word * (i * kFactor + 1);
  }
  uint64_t rest = 0;
  std::memcpy(&rest, bytes + whole * sizeof(rest), flat.nbytes() % sizeof(rest));
  return static_cast<int64_t>(sum + rest * (whole * kFactor + 1));
}

at::ScalarType word_type(size_t bytes) {
  return bytes == 1 ? at::kChar : bytes == 2 ? at::kShort : bytes == 4 ? at::kInt : at::kLong;
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

at::Tensor device_checksum_of(const at::Tensor& values) {
  const at::NoGradGuard no_grad;
  const at::Tensor flat = values.detach().contiguous().view({-1});
  if (flat.is_cpu()) return at::scalar_tensor(checksum_on_host(flat), at::kLong);
  return checksum_in_rows(flat.view(word_type(flat.element_size())));
}

at::Tensor checksum_in_rows(const at::Tensor& words) {
  constexpr int64_t kRow = 4096;
  const int64_t in_rows = words.numel() / kRow * kRow;
  const at::Tensor rows = words.narrow(0, 0, in_rows).view({-1, kRow}).sum({1}, /*keepdim=*/false, at::kLong);
  const at::Tensor rest = words.narrow(0, in_rows, words.numel() - in_rows).sum(at::kLong).view({1});
  const at::Tensor sums = at::cat({rows, rest});
  // Odd factors: a sum that differs by less than 2^64 stays another one.
  const at::Tensor factors = at::arange(sums.numel(), sums.options()) * (2 * int64_t{0x2C1B3C6D2A14E9B7}) + 1;
  return (sums * factors).sum();
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
