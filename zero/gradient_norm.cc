#include "zero/gradient_norm.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/linalg_vector_norm.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "optim/host_threads.h"
#include "optim/kernels/square_sum.h"
#include "optim/vector_update.h"

namespace ds::zero {
namespace {

constexpr int64_t kChunk = 1 << 16;
constexpr int64_t kGrain = 4 * kChunk;
constexpr int64_t kDeviceChunk = 1 << 24;

// Sums of whole chunks, added in order: the threads that made them do not matter.
double sum_of_squares_on_cpu(const at::Tensor& flat, optim::ValueType type) {
  std::vector<double> sums(static_cast<size_t>((flat.numel() + kChunk - 1) / kChunk));
  const auto* values = static_cast<const char*>(flat.const_data_ptr());
  const auto bytes = static_cast<int64_t>(flat.element_size());
  optim::for_each_range(flat, kChunk, kGrain, [&](int64_t begin, int64_t end) {
    for (; begin < end; begin += kChunk) {
      sums[static_cast<size_t>(begin / kChunk)] =
          optim::square_sum(values + begin * bytes, type, std::min(kChunk, end - begin));
    }
  });
  return std::accumulate(sums.begin(), sums.end(), 0.0);
}

}  // namespace

double sum_of_squares(const at::Tensor& flat) {
  const at::NoGradGuard no_grad;
  const std::optional<optim::ValueType> type = optim::value_type(flat.scalar_type());
  if (flat.is_cpu() && flat.is_contiguous() && type) return sum_of_squares_on_cpu(flat, *type);
  const auto norm = at::linalg_vector_norm(flat, 2, std::nullopt, false, at::kDouble).item<double>();
  return norm * norm;
}

int64_t first_non_finite(const at::Tensor& flat) {
  const at::NoGradGuard no_grad;
  if (std::isfinite(sum_of_squares(flat))) return -1;
  // An accelerator is asked seldom.
  const int64_t chunk = flat.is_cpu() ? kChunk : kDeviceChunk;
  for (int64_t begin = 0; begin < flat.numel(); begin += chunk) {
    const int64_t length = std::min(chunk, flat.numel() - begin);
    const at::Tensor bad = at::isfinite(flat.narrow(0, begin, length)).logical_not();
    if (bad.any().item<bool>()) return begin + bad.to(at::kInt).argmax().item<int64_t>();
  }
  return -1;
}

}  // namespace ds::zero
