#include "zero/reduction/gradient_bucket.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "core/memory/storage_memory.h"

namespace ds::zero {
namespace {

// Note [AdditionOrder]
// Gradients of micro-batches are added as they come: each is added to the sum of all before it. So the bits of a sum
// follow from the order of the passes, which all ranks share, and from how the passes are cut into reductions. That
// order is decided here and in what calls this:
//   * GradientBucket::collect: a pass's gradient to those of passes that are not reduced yet. Where the parameter's
//     gradient is a view of the bucket, autograd itself has added, in the same order;
//   * GradientBucket::set_aside: a reduced gradient to the sum of those reduced before. Slices that are kept elsewhere
//     are added there (ReducedGradients::add), in the order of the calls;
//   * GradientBucket::join_sum: that sum to what was reduced last.
// Another order (a fixed tree over micro-batches, say) takes the place of this function, and needs every gradient
// taken away from its parameter, so that autograd has nothing to add to.
void add_in_order(const at::Tensor& sum, const at::Tensor& gradient) { sum.add_(gradient); }

// A tensor over the same memory that autograd does not count as a view: zero_grad() of torch's optimizers detaches
// gradients in place, which views refuse.
at::Tensor plain_view(const at::Tensor& view) { return view.variable_data(); }

}  // namespace

GradientBucket::GradientBucket(size_t index, const ParameterBucket& parameters, const GradientExchange& exchange,
                               BufferPool& buffers)
    : index_(index),
      parameters_(&parameters),
      exchange_(&exchange),
      buffers_(&buffers),
      filled_(parameters.layout().segments.size(), 0),
      seen_(filled_),
      arrived_(filled_) {}

void GradientBucket::begin_pass() {
  missing_ = arrived_.size();
  std::fill(arrived_.begin(), arrived_.end(), 0);
  if (!plain()) return;
  state_ = after(state_, BucketEvent::kReopen);
  std::fill(filled_.begin(), filled_.end(), 0);
}

void GradientBucket::collect(size_t position, GradientCheck* check) {
  const at::NoGradGuard no_grad;
  const BucketState next = after(state_, BucketEvent::kCollect);
  const Segment& segment = parameters_->layout().segments[position];
  const at::Tensor& parameter = parameters()[position].tensor;
  at::Tensor gradient = parameter.grad();
  ensure(gradient.defined(), "a gradient hook runs after its gradient is set");
  if (gradient.layout() != at::kStrided) gradient = gradient.to_dense();
  if (check) check->see(segment.parameter, gradient);
  if (!local_.defined()) open();
  const at::Tensor view = view_of(local_, segment, parameter);
  const bool same_memory = gradient.data_ptr() == view.data_ptr() && gradient.scalar_type() == view.scalar_type();
  if (!same_memory) {
    if (filled_[position] && !plain()) {
      add_in_order(view, gradient);
    } else {
      view.copy_(gradient);
    }
  }
  // The parameter's gradient is a view of the bucket, so that the next micro-batch adds in place; where the dtypes
  // differ (or the bucket is transient) the gradient is taken away and the next pass makes a new one.
  if (plain()) {
    if (exchange_->options().gradients_are_views) parameter.mutable_grad() = plain_view(view);
  } else if (view.scalar_type() == parameter.scalar_type() && !transient()) {
    parameter.mutable_grad() = view;
  } else {
    parameter.mutable_grad().reset();
  }
  filled_[position] = 1;
  seen_[position] = 1;
  if (!std::exchange(arrived_[position], 1)) --missing_;
  state_ = next;
}

void GradientBucket::open() {
  const at::TensorOptions options = parameters_->options();
  const at::ScalarType dtype = exchange_->options().gradient_dtype;
  local_ =
      buffers_->take(parameters_->layout().numel, dtype == at::ScalarType::Undefined ? options : options.dtype(dtype));
  zero_padding();
}

void GradientBucket::zero_padding() {
  for (const auto& [offset, length] : padding_of(parameters_->layout())) local_.narrow(0, offset, length).zero_();
}

void GradientBucket::fill_missing() {
  if (!local_.defined()) open();
  const auto& segments = parameters_->layout().segments;
  for (size_t i = 0; i < segments.size(); ++i) {
    if (filled_[i]) continue;
    if (plain() && parameters()[i].tensor.grad().defined()) {
      fill_from_parameter(i);
    } else {
      local_.narrow(0, segments[i].slice_offset, segments[i].length).zero_();
    }
    filled_[i] = 1;
  }
}

// The pass gave it none: what it has is of earlier ones, or the program's own. It becomes part of the bucket where this
// rank has used it since the last reduction; else show() says whether another one has, and if not it stays as it is.
void GradientBucket::fill_from_parameter(size_t position) {
  const at::Tensor& parameter = parameters()[position].tensor;
  at::Tensor& gradient = parameter.mutable_grad();
  const at::Tensor view = view_of(local_, parameters_->layout().segments[position], parameter);
  if (gradient.layout() == at::kStrided && gradient.data_ptr() == view.data_ptr()) {
    if (!seen_[position]) gradient = gradient.clone();
    return;
  }
  view.copy_(gradient.layout() == at::kStrided ? gradient : gradient.to_dense());
  if (seen_[position] && exchange_->options().gradients_are_views) gradient = plain_view(view);
}

void GradientBucket::show(const std::vector<char>& used, double factor) {
  ensure(plain() && state_ == BucketState::kReduced, "a bucket of plain gradients is shown when it is reduced");
  const at::NoGradGuard no_grad;
  if (factor != 1.0) local_.mul_(factor);
  for (size_t i = 0; i < parameters().size(); ++i) {
    if (!used.empty() && used[static_cast<size_t>(parameter_index(i))] == 0) continue;
    const at::Tensor& parameter = parameters()[i].tensor;
    at::Tensor& gradient = parameter.mutable_grad();
    const at::Tensor view = view_of(local_, parameters_->layout().segments[i], parameter);
    if (exchange_->options().gradients_are_views) {
      gradient = plain_view(view);
    } else if (gradient.defined() && gradient.layout() == at::kStrided) {
      gradient.copy_(view);
    } else {
      gradient = view.clone();
    }
  }
  std::fill(seen_.begin(), seen_.end(), 0);
}

void GradientBucket::launch() {
  const at::NoGradGuard no_grad;
  const BucketState next = after(state_, BucketEvent::kLaunch);
  fill_missing();
  // An overflow that is compressed spreads to its neighbours.
  if (exchange_->replacement_of(index_)) zero_padding();
  state_ = next;  // also where the collective throws: what it has of the buffer is then unknown
  if (transient()) launch_point_ = StreamPoint::here(device());
  exchange_->start(index_, local_, transfer_);
}

void GradientBucket::complete() {
  const at::NoGradGuard no_grad;
  const BucketState next = after(state_, BucketEvent::kComplete);
  exchange_->finish(index_, local_, transfer_);
  state_ = next;
}

void GradientBucket::set_aside(ReducedGradients* elsewhere) {
  const at::NoGradGuard no_grad;
  const BucketState next = after(state_, BucketEvent::kSetAside);
  const at::Tensor own = exchange_->own_part(index_, local_);
  if (elsewhere) {
    elsewhere->add(index_, own);
  } else if (sum_.defined()) {
    add_in_order(sum_, own);
  } else {
    sum_ = own.is_same(local_) && !transient() ? local_ : kept_slice(own);
  }
  empty();
  state_ = next;
}

// Buckets that are not transient keep their buffer for the next pass, unless the sum has taken it.
void GradientBucket::empty() {
  drop_parameter_gradients();
  if (sum_.is_same(local_)) {
    local_.reset();
  } else if (transient() && local_.defined()) {
    buffers_->give_back(std::exchange(local_, at::Tensor()));
  }
  std::fill(filled_.begin(), filled_.end(), 0);
}

void GradientBucket::drop_parameter_gradients() {
  if (!local_.defined()) return;
  for (const Parameter& parameter : parameters()) {
    at::Tensor& gradient = parameter.tensor.mutable_grad();
    if (gradient.defined() && is_same_storage(gradient.storage(), local_.storage())) gradient.reset();
  }
}

// Slices would leave holes among the larger buffers if they were freed and made in every step.
at::Tensor GradientBucket::kept_slice(const at::Tensor& own) {
  if (!slice_.defined()) {
    slice_ = at::empty_like(own);
    buffers_->count(static_cast<int64_t>(slice_.nbytes()));
  }
  return slice_.copy_(own);
}

void GradientBucket::join_sum() {
  ensure(state_ == BucketState::kReduced, "a sum of reduced gradients is joined with a reduced one");
  if (!sum_.defined()) return;
  const at::NoGradGuard no_grad;
  add_in_order(exchange_->own_part(index_, local_), sum_);
  drop_sum();
}

void GradientBucket::drop_sum() {
  if (sum_.defined() && !sum_.is_same(slice_)) buffers_->count(-static_cast<int64_t>(sum_.nbytes()));
  sum_.reset();
}

void GradientBucket::reset() {
  if (state_ == BucketState::kInFlight) complete();
  const BucketState next = after(state_, BucketEvent::kDrop);
  drop_sum();
  empty();
  std::fill(seen_.begin(), seen_.end(), 0);
  state_ = next;
}

void GradientBucket::release() {
  ensure(state_ == BucketState::kEmpty, "the memory of an empty bucket is given up");
  local_.reset();
  slice_.reset();
}

at::Tensor GradientBucket::gradient() const { return launched() ? exchange_->own_part(index_, local_) : sum_; }

}  // namespace ds::zero
