#include "engine/update/token_counts.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <cmath>

#include "core/check.h"

namespace ds::engine {
namespace {

// Returns the reduction of a number over data-parallel ranks.
double over_ranks(double value, comm::ReduceOp op, const Ranks& ranks, const char* label) {
  if (ranks.part->size() == 1) return value;
  const at::Tensor number = at::full({1}, value, at::TensorOptions().dtype(at::kDouble).device(ranks.device));
  ranks.part->all_reduce(number, op, label).wait();
  return number.item<double>();
}

}  // namespace

void TokenCounts::require_kind(const char* call, bool counted) const {
  if (kind_ == Kind::kNone || used() == counted) return;
  throw UsageError(
      cat(call, ": expected one kind of loss in a step, found that this step has had ",
          used() ? "backward_mean(sum, count)" : "backward()", ": a mean over all counts and means of ",
          "micro-batches have no common weight. Use one of them for the whole accumulation; several losses ",
          "of one batch are added before one backward_mean(), each as a sum over the same count"));
}

void TokenCounts::add(double count, int64_t micro_batches_per_update) {
  if (unit_ == 0) {
    const at::NoGradGuard no_grad;
    const double largest = over_ranks(count, comm::ReduceOp::kMax, state_.ranks, "the first count of backward_mean()");
    unit_ = std::exp2(std::ceil(std::log2(std::max(largest, 1.0) * static_cast<double>(micro_batches_per_update))));
  }
  kind_ = Kind::kCounts;
  own_ += count;
  total_.reset();
}

double TokenCounts::gradients_unit() const {
  return state_.plan.average_gradients ? unit_ * state_.ranks.part->size() : unit_;
}

double TokenCounts::divisor() {
  if (!used()) return 1.0;
  if (!total_) {
    const at::NoGradGuard no_grad;
    total_ = over_ranks(own_, comm::ReduceOp::kSum, state_.ranks, "the counts of backward_mean()");
  }
  return (*total_ == 0 ? 1.0 : *total_) / gradients_unit();  // without a count the gradient is that of the sum
}

at::Tensor TokenCounts::divisor_on_device(const at::Tensor& total) const {
  return at::where(total == 0, at::ones_like(total), total) / gradients_unit();
}

void TokenCounts::forget() {
  kind_ = Kind::kNone;
  own_ = 0;
  total_.reset();
}

}  // namespace ds::engine
