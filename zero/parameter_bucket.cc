#include "zero/parameter_bucket.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/StorageImpl.h>

#include <utility>

#include "core/check.h"

namespace ds::zero {

at::Tensor view_of(const at::Tensor& flat, const Segment& segment, const at::Tensor& like) {
  return flat.narrow(0, segment.slice_offset, segment.length).view(like.sizes());
}

at::Tensor flatten(const BucketLayout& layout, const std::vector<Parameter>& parameters, at::ScalarType dtype) {
  const at::NoGradGuard no_grad;
  const at::Tensor& first = parameters.at(static_cast<size_t>(layout.segments.front().parameter)).tensor;
  at::Tensor flat = at::empty({layout.numel}, first.options().dtype(dtype).requires_grad(false));
  for (const auto& [offset, length] : padding_of(layout)) flat.narrow(0, offset, length).zero_();
  for (const Segment& segment : layout.segments) {
    const at::Tensor& parameter = parameters[static_cast<size_t>(segment.parameter)].tensor;
    view_of(flat, segment, parameter).copy_(parameter.detach());
  }
  return flat;
}

ParameterBucket::ParameterBucket(BucketLayout layout, const std::vector<Parameter>& parameters,
                                 const at::Tensor& values, at::ScalarType dtype)
    : layout_(std::move(layout)), flat_(values.to(dtype)) {
  const at::NoGradGuard no_grad;
  for (const Segment& segment : layout_.segments) {
    parameters_.push_back(parameters[static_cast<size_t>(segment.parameter)]);
    at::Tensor parameter = parameters_.back().tensor;
    parameter.set_data(view_of(flat_, segment, parameter));
  }
}

std::string ParameterBucket::describe(size_t index) const {
  const size_t more = parameters_.size() - 1;
  return cat(index, " (", parameters_.front().name, more > 0 ? cat(", ", more, " more)") : ")");
}

at::Tensor ParameterBucket::slice(int rank) const {
  return sharded() ? own_ : flat_.narrow(0, rank * layout_.slice_numel, layout_.slice_numel);
}

void ParameterBucket::shard(int rank) {
  ensure(!sharded(), "a bucket is sharded once");
  own_ = slice(rank).clone();
  release();
}

void ParameterBucket::allocate() {
  ensure(sharded() && !allocated(), "only a released bucket takes memory");
  c10::StorageImpl* storage = flat_.storage().unsafeGetStorageImpl();
  const size_t bytes = static_cast<size_t>(layout_.numel) * flat_.element_size();
  storage->set_data_ptr_noswap(storage->allocator()->allocate(bytes));
  storage->set_nbytes(bytes);
}

void ParameterBucket::release() {
  ensure(sharded(), "only a sharded bucket gives its memory back");
  c10::StorageImpl* storage = flat_.storage().unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(c10::DataPtr(nullptr, flat_.device()));
  storage->set_nbytes(0);
}

int64_t ParameterBucket::held_bytes() const {
  return static_cast<int64_t>(flat_.storage().nbytes()) + (sharded() ? static_cast<int64_t>(own_.nbytes()) : 0);
}

}  // namespace ds::zero
