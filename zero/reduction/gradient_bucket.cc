#include "zero/reduction/gradient_bucket.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "core/device/stream_point.h"
#include "core/slices/reduced_gradients.h"

namespace ds::zero {

GradientBucket::GradientBucket(size_t index, const ParameterBucket& parameters, const GradientExchange& exchange,
                               BufferPool& buffers)
    : index_(index),
      parameters_(&parameters),
      exchange_(&exchange),
      buffer_(parameters, exchange.options(), buffers),
      seen_(parameters.layout().segments.size(), 0),
      arrived_(seen_),
      sum_(buffers) {
  if (parameters.layout().row_width > 0) rows_.emplace(index, parameters, exchange);
}

void GradientBucket::begin_pass() {
  missing_ = arrived_.size();
  std::fill(arrived_.begin(), arrived_.end(), 0);
  if (!exchange_->options().plain_gradients()) return;
  state_ = after(state_, BucketEvent::kReopen);
  buffer_.forget_filled();
}

void GradientBucket::collect(size_t position, GradientCheck* check) {
  const at::NoGradGuard no_grad;
  const BucketState next = after(state_, BucketEvent::kCollect);
  at::Tensor gradient = parameters_->parameters()[position].tensor.grad();
  ensure(gradient.defined(), "a gradient hook runs after its gradient is set");
  const int64_t number = parameters_->layout().segments[position].parameter;
  if (rows_) {
    if (check) check->see(number, rows_->arriving());
    rows_->collect();
  } else {
    if (gradient.layout() != at::kStrided) gradient = gradient.to_dense();
    if (check) check->see(number, gradient);
    buffer_.collect(position, gradient);
  }
  seen_[position] = 1;
  if (!std::exchange(arrived_[position], 1)) --missing_;
  state_ = next;
}

void GradientBucket::show(const std::vector<char>& used, double factor) {
  ensure(exchange_->options().plain_gradients() && state_ == BucketState::kReduced,
         "a bucket of plain gradients is shown when it is reduced");
  const at::NoGradGuard no_grad;
  buffer_.show(used, factor);
  std::fill(seen_.begin(), seen_.end(), 0);
}

void GradientBucket::launch() {
  const at::NoGradGuard no_grad;
  const BucketState next = after(state_, BucketEvent::kLaunch);
  if (rows_) {
    state_ = next;
    return rows_->launch();
  }
  buffer_.fill_missing(seen_);
  // An overflow that is compressed spreads to its neighbours.
  if (exchange_->replacement_of(index_)) buffer_.zero_padding();
  state_ = next;  // also where the collective throws: what it has of the buffer is then unknown
  if (exchange_->options().transient()) {
    transfer_.launch_point = StreamPoint::here(parameters_->options().device());
  }
  exchange_->start(index_, buffer_.flat(), transfer_);
}

void GradientBucket::complete() {
  const at::NoGradGuard no_grad;
  const BucketState next = after(state_, BucketEvent::kComplete);
  if (rows_) {
    rows_->complete();
  } else {
    exchange_->finish(index_, buffer_.flat(), transfer_);
  }
  state_ = next;
}

void GradientBucket::set_aside() {
  const at::NoGradGuard no_grad;
  const BucketState next = after(state_, BucketEvent::kSetAside);
  if (rows_) {
    rows_->set_aside();
    state_ = next;
    return;
  }
  const at::Tensor own = exchange_->own_part(index_, buffer_.flat());
  if (ReducedGradients* const elsewhere = exchange_->elsewhere_of(index_)) {
    elsewhere->add(index_, own);
  } else if (!has_sum() && own.is_same(buffer_.flat()) && !exchange_->options().transient()) {
    sum_.begin_with(buffer_.hand_over());
  } else {
    sum_.add(own);
  }
  buffer_.clear();  // a buffer that the sum has taken is empty already
  state_ = next;
}

void GradientBucket::join_sum() {
  ensure(state_ == BucketState::kReduced, "a sum of reduced gradients is joined with a reduced one");
  if (!has_sum()) return;
  const at::NoGradGuard no_grad;
  if (rows_) return rows_->join_sum();
  sum_.move_to(exchange_->own_part(index_, buffer_.flat()));
}

void GradientBucket::reset() {
  if (state_ == BucketState::kInFlight) complete();
  const BucketState next = after(state_, BucketEvent::kDrop);
  sum_.drop();
  buffer_.clear();
  if (rows_) rows_->drop();
  std::fill(seen_.begin(), seen_.end(), 0);
  state_ = next;
}

void GradientBucket::release() {
  ensure(state_ == BucketState::kEmpty, "the memory of an empty bucket is given up");
  buffer_.release();
  sum_.release();
}

at::Tensor GradientBucket::gradient() const {
  if (rows_) return rows_->gradient();
  if (ReducedGradients* const elsewhere = exchange_->elsewhere_of(index_)) return elsewhere->gradient(index_);
  return launched() ? exchange_->own_part(index_, buffer_.flat()) : sum_.tensor();
}

}  // namespace ds::zero
