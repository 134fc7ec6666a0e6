#include "zero/parameter_bucket.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <utility>

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
    at::Tensor parameter = parameters[static_cast<size_t>(segment.parameter)].tensor;
    parameter.set_data(view_of(flat_, segment, parameter));
  }
}

}  // namespace ds::zero
