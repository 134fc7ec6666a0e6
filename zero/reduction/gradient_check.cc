#include "zero/reduction/gradient_check.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/where.h>

#include <cmath>
#include <limits>

#include "zero/square_sum.h"

namespace ds::zero {
namespace {

constexpr int64_t kNone = std::numeric_limits<int64_t>::max();

}  // namespace

void GradientCheck::see(int64_t parameter, const at::Tensor& gradient) {
  if (found_ || gradient.numel() == 0) return;
  const at::NoGradGuard no_grad;
  if (!lazy_) {
    if (!std::isfinite(sum_of_squares(gradient))) found_ = Found{parameter, micro_batch_};
    return;
  }
  const at::TensorOptions place = at::TensorOptions().dtype(at::kLong).device(device_);
  if (!first_.defined()) first_ = at::full({}, kNone, place);
  // The largest size of an element: no sum that could overflow.
  const at::Tensor largest = at::linalg_vector_norm(gradient, std::numeric_limits<double>::infinity());
  const at::Tensor here = at::full({}, static_cast<int64_t>(seen_.size()), place);
  first_ = at::minimum(first_, at::where(at::isfinite(largest), at::full({}, kNone, place), here));
  seen_.push_back({parameter, micro_batch_});
}

std::optional<GradientCheck::Found> GradientCheck::first() const {
  if (!first_.defined()) return found_;
  const auto place = first_.item<int64_t>();
  if (place == kNone) return std::nullopt;
  return seen_.at(static_cast<size_t>(place));
}

void GradientCheck::reset() {
  found_.reset();
  seen_.clear();
  first_.reset();
}

}  // namespace ds::zero
