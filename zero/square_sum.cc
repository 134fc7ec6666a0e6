#include "zero/square_sum.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "core/host_threads.h"
#include "core/numbers/float_format_of.h"
#include "optim/kernels/square_sum.h"

namespace ds::zero {
namespace {

constexpr int64_t kChunk = 1 << 16;
constexpr int64_t kGrain = 4 * kChunk;
constexpr int64_t kDeviceChunk = 1 << 24;

bool is_summed_on_cpu(const at::Tensor& flat) {
  return flat.is_cpu() && flat.is_contiguous() && float_format_of(flat.scalar_type());
}

// Sums of whole chunks, added in order: the threads that made them do not matter.
double sum_of_squares_on_cpu(const at::Tensor& flat, FloatFormat type) {
  std::vector<double> sums(static_cast<size_t>((flat.numel() + kChunk - 1) / kChunk));
  const auto* values = static_cast<const char*>(flat.const_data_ptr());
  const auto bytes = flat.element_size();
  for_each_range(flat, kChunk, kGrain, [&](int64_t begin, int64_t end) {
    for (; begin < end; begin += kChunk) {
      sums[static_cast<size_t>(begin / kChunk)] =
          optimizers::square_sum(values + begin * bytes, type, std::min(kChunk, end - begin));
    }
  });
  return std::accumulate(sums.begin(), sums.end(), 0.0);
}

// float64 [rows]. A norm in float64 would begin with a copy of all elements in float64.
at::Tensor squares_of_rows(const at::Tensor& rows) {
  return at::linalg_vector_norm(rows, 2, {1}, false, at::kFloat).to(at::kDouble).square();
}

at::Tensor sum_on_device(const at::Tensor& flat) {
  const int64_t rows = flat.numel() / kChunk;
  at::Tensor sum = squares_of_rows(flat.narrow(0, 0, rows * kChunk).view({rows, kChunk})).sum();
  const int64_t rest = flat.numel() - rows * kChunk;
  if (rest > 0) sum += squares_of_rows(flat.narrow(0, rows * kChunk, rest).view({1, rest})).sum();
  return sum;
}

// A norm in float64 of other elements begins with a copy of them in float64: of so many at a time.
double sum_in_pieces(const at::Tensor& flat) {
  double sum = 0;
  for (int64_t begin = 0; begin < flat.numel(); begin += kDeviceChunk) {
    const at::Tensor piece = flat.narrow(0, begin, std::min(kDeviceChunk, flat.numel() - begin));
    const auto norm = at::linalg_vector_norm(piece, 2, std::nullopt, false, at::kDouble).item<double>();
    sum += norm * norm;
  }
  return sum;
}

// Of a tensor whose sum in float32 is not finite: because an element is not, as with every overflow of a loss scale, or
// because squares are beyond float32. The largest element tells, in its own dtype.
double sum_beyond_float32(const at::Tensor& flat) {
  const auto largest =
      at::linalg_vector_norm(flat, std::numeric_limits<double>::infinity(), std::nullopt, false).item<double>();
  return std::isfinite(largest) ? sum_in_pieces(flat) : largest;
}

}  // namespace

double sum_of_squares(const at::Tensor& flat) {
  const at::NoGradGuard no_grad;
  if (is_summed_on_cpu(flat)) return sum_of_squares_on_cpu(flat, *float_format_of(flat.scalar_type()));
  return sum_in_pieces(flat.reshape(-1));
}

void SquareSum::add(const at::Tensor& flat) {
  if (flat.is_cpu() || !flat.is_contiguous() || flat.scalar_type() == at::kDouble) {
    on_host_ += sum_of_squares(flat);
    return;
  }
  const at::NoGradGuard no_grad;
  on_device_.push_back(flat);
  sums_.push_back(sum_on_device(flat));
}

double SquareSum::total() const {
  if (sums_.empty()) return on_host_;
  const at::NoGradGuard no_grad;
  const at::Tensor sums = at::stack(sums_).cpu();
  double total = on_host_;
  for (size_t i = 0; i < sums_.size(); ++i) {
    const double sum = sums.const_data_ptr<double>()[i];
    total += std::isfinite(sum) ? sum : sum_beyond_float32(on_device_[i]);
  }
  return total;
}

at::Tensor SquareSum::total_on(at::Device device) const {
  const at::NoGradGuard no_grad;
  const auto options = at::TensorOptions().dtype(at::kDouble).device(device);
  const at::Tensor host = at::full({1}, on_host_, options);
  return sums_.empty() ? host : host.add_(at::stack(sums_).sum());
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
