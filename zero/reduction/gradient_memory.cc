#include "zero/reduction/gradient_memory.h"

#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "core/memory/storage_memory.h"

namespace ds::zero {
namespace {

// Note [AdditionOrder]
// Gradients of micro-batches are added as they come: each is added to the sum of all before it. So the bits of a sum
// follow from the order of the passes, which all ranks share, and from how the passes are cut into reductions. That
// order is decided here and in what calls this:
//   * GradientBuffer::collect: a pass's gradient to those of passes that are not reduced yet. Where the parameter's
//     gradient is a view of the bucket, autograd itself has added, in the same order;
//   * ReducedSum::add: a reduced gradient to the sum of those reduced before. Slices that are kept elsewhere are added
//     there (ReducedGradients::add), in the order of the calls;
//   * ReducedSum::move_to: that sum to what was reduced last.
// Another order (a fixed tree over micro-batches, say) takes the place of this function, and needs every gradient
// taken away from its parameter, so that autograd has nothing to add to.
void add_in_order(const at::Tensor& sum, const at::Tensor& gradient) { sum.add_(gradient); }

// A tensor over the same memory that autograd does not count as a view: zero_grad() of torch's optimizers detaches
// gradients in place, which views refuse.
at::Tensor plain_view(const at::Tensor& view) { return view.variable_data(); }

}  // namespace

GradientBuffer::GradientBuffer(const ParameterBucket& parameters, const ReducerOptions& options, BufferPool& pool)
    : parameters_(&parameters), options_(&options), pool_(&pool), filled_(parameters.layout().segments.size(), 0) {}

void GradientBuffer::open() {
  const at::TensorOptions options = parameters_->options();
  const at::ScalarType dtype = options_->gradient_dtype;
  flat_ = pool_->take(parameters_->layout().numel, dtype == at::ScalarType::Undefined ? options : options.dtype(dtype));
  zero_padding();
}

void GradientBuffer::zero_padding() {
  for (const auto& [offset, length] : padding_of(parameters_->layout())) flat_.narrow(0, offset, length).zero_();
}

at::Tensor GradientBuffer::view(size_t position) const {
  return view_of(flat_, parameters_->layout().segments[position], parameters_->parameters()[position].tensor);
}

void GradientBuffer::collect(size_t position, const at::Tensor& gradient) {
  if (!flat_.defined()) open();
  const at::Tensor& parameter = parameters_->parameters()[position].tensor;
  const at::Tensor own = view(position);
  const bool same_memory = gradient.data_ptr() == own.data_ptr() && gradient.scalar_type() == own.scalar_type();
  if (!same_memory) {
    if (filled_[position] && !options_->plain_gradients()) {
      add_in_order(own, gradient);
    } else {
      own.copy_(gradient);
    }
  }
  // The parameter's gradient is a view of the bucket, so that the next micro-batch adds in place; where the dtypes
  // differ (or the bucket is transient) the gradient is taken away and the next pass makes a new one.
  if (options_->plain_gradients()) {
    if (options_->gradients_are_views) parameter.mutable_grad() = plain_view(own);
  } else if (own.scalar_type() == parameter.scalar_type() && !options_->transient()) {
    parameter.mutable_grad() = own;
  } else {
    parameter.mutable_grad().reset();
  }
  filled_[position] = 1;
}

void GradientBuffer::fill_missing(const std::vector<char>& seen) {
  if (!flat_.defined()) open();
  const auto& segments = parameters_->layout().segments;
  for (size_t i = 0; i < segments.size(); ++i) {
    if (filled_[i]) continue;
    if (options_->plain_gradients() && parameters_->parameters()[i].tensor.grad().defined()) {
      fill_from_parameter(i, seen[i] != 0);
    } else {
      flat_.narrow(0, segments[i].slice_offset, segments[i].length).zero_();
    }
    filled_[i] = 1;
  }
}

// The pass gave it none: what it has is of earlier ones, or the program's own. It becomes part of the bucket where this
// rank has used it since the last reduction; else show() says whether another one has, and if not it stays as it is.
void GradientBuffer::fill_from_parameter(size_t position, bool seen) {
  at::Tensor& gradient = parameters_->parameters()[position].tensor.mutable_grad();
  const at::Tensor own = view(position);
  if (gradient.layout() == at::kStrided && gradient.data_ptr() == own.data_ptr()) {
    if (!seen) gradient = gradient.clone();
    return;
  }
  own.copy_(gradient.layout() == at::kStrided ? gradient : gradient.to_dense());
  if (seen && options_->gradients_are_views) gradient = plain_view(own);
}

void GradientBuffer::forget_filled() { std::fill(filled_.begin(), filled_.end(), 0); }

void GradientBuffer::show(const std::vector<char>& used, double factor) {
  if (factor != 1.0) flat_.mul_(factor);
  const auto& segments = parameters_->layout().segments;
  for (size_t i = 0; i < segments.size(); ++i) {
    if (!used.empty() && used[static_cast<size_t>(segments[i].parameter)] == 0) continue;
    at::Tensor& gradient = parameters_->parameters()[i].tensor.mutable_grad();
    const at::Tensor own = view(i);
    if (options_->gradients_are_views) {
      gradient = plain_view(own);
    } else if (gradient.defined() && gradient.layout() == at::kStrided) {
      gradient.copy_(own);
    } else {
      gradient = own.clone();
    }
  }
}

void GradientBuffer::drop_parameter_gradients() {
  if (!flat_.defined()) return;
  for (const Parameter& parameter : parameters_->parameters()) {
    at::Tensor& gradient = parameter.tensor.mutable_grad();
    if (gradient.defined() && is_same_storage(gradient.storage(), flat_.storage())) gradient.reset();
  }
}

void GradientBuffer::clear() {
  drop_parameter_gradients();
  if (options_->transient() && flat_.defined()) pool_->give_back(std::exchange(flat_, at::Tensor()));
  forget_filled();
}

at::Tensor GradientBuffer::hand_over() {
  drop_parameter_gradients();
  forget_filled();
  return std::exchange(flat_, at::Tensor());
}

void ReducedSum::add(const at::Tensor& gradient) {
  if (sum_.defined()) return add_in_order(sum_, gradient);
  // Slices would leave holes among the larger buffers if they were freed and made in every step.
  if (!slice_.defined()) {
    slice_ = at::empty_like(gradient);
    pool_->count(static_cast<int64_t>(slice_.nbytes()));
  }
  sum_ = slice_.copy_(gradient);
}

void ReducedSum::begin_with(at::Tensor buffer) { sum_ = std::move(buffer); }

void ReducedSum::move_to(const at::Tensor& gradient) {
  add_in_order(gradient, sum_);
  drop();
}

void ReducedSum::drop() {
  if (sum_.defined() && !sum_.is_same(slice_)) pool_->count(-static_cast<int64_t>(sum_.nbytes()));
  sum_.reset();
}

}  // namespace ds::zero
