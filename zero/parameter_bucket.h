// A flat buffer that holds parameters of the model; the parameters become views of it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "zero/partition.h"

namespace ds::zero {

// A trainable parameter of the model. `tensor` shares its identity with the module's (set_data changes both).
struct Parameter {
  std::string name;
  at::Tensor tensor;
};

// Owns `flat` ([layout.numel], the model's dtype and device). Padding holds zeros. Not thread safe.
class ParameterBucket {
 public:
  // `values` are the float32 (or original dtype) values of the whole bucket, as made by `flatten`; the bucket is
  // allocated in `dtype` on the parameters' device and the parameters are re-pointed into it.
  ParameterBucket(BucketLayout layout, const std::vector<Parameter>& parameters, const at::Tensor& values,
                  at::ScalarType dtype);

  const BucketLayout& layout() const { return layout_; }
  const at::Tensor& flat() const { return flat_; }
  // The part of flat() that rank `rank` owns; a view.
  at::Tensor slice(int rank) const { return flat_.narrow(0, rank * layout_.slice_numel, layout_.slice_numel); }

 private:
  BucketLayout layout_;
  at::Tensor flat_;
};

// Joins the current values of a bucket's parameters in one new flat tensor of `dtype`; padding is zero.
at::Tensor flatten(const BucketLayout& layout, const std::vector<Parameter>& parameters, at::ScalarType dtype);

// A view of `flat` with the shape of `like`, at a segment that covers a whole parameter.
at::Tensor view_of(const at::Tensor& flat, const Segment& segment, const at::Tensor& like);

}  // namespace ds::zero
