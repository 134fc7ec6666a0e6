#include "zero/gradient_norm.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/linalg_vector_norm.h>

#include <algorithm>
#include <array>

namespace ds::zero {
namespace {

constexpr int64_t kChunk = 1 << 16;

// Sixteen independent sums let the compiler use vectors without reordering a sum.
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
double
sum_of_squares_float(const float* values, int64_t count) {
  constexpr int64_t kLanes = 16;
  std::array<double, kLanes> sums{};
  const int64_t whole = count / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const double value = values[i + lane];
      sums[static_cast<size_t>(lane)] += value * value;
    }
  }
  for (int64_t i = whole; i < count; ++i) sums[static_cast<size_t>(i - whole)] += double{values[i]} * values[i];
  double total = 0;
  for (const double sum : sums) total += sum;
  return total;
}

}  // namespace

double sum_of_squares(const at::Tensor& flat) {
  const at::NoGradGuard no_grad;
  double total = 0;
  for (int64_t begin = 0; begin < flat.numel(); begin += kChunk) {
    const int64_t length = std::min(kChunk, flat.numel() - begin);
    at::Tensor chunk = flat.narrow(0, begin, length);
    if (!flat.is_cpu()) {
      const auto norm = at::linalg_vector_norm(flat, 2, std::nullopt, false, at::kDouble).item<double>();
      return norm * norm;
    }
    chunk = chunk.to(at::kFloat);
    total += sum_of_squares_float(chunk.const_data_ptr<float>(), length);
  }
  return total;
}

int64_t first_non_finite(const at::Tensor& flat) {
  const at::NoGradGuard no_grad;
  for (int64_t begin = 0; begin < flat.numel(); begin += kChunk) {
    const int64_t length = std::min(kChunk, flat.numel() - begin);
    const at::Tensor bad = at::isfinite(flat.narrow(0, begin, length)).logical_not();
    if (bad.any().item<bool>()) return begin + bad.to(at::kInt).argmax().item<int64_t>();
  }
  return -1;
}

}  // namespace ds::zero
