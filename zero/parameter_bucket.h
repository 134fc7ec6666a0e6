// A flat buffer that holds parameters of the model; the parameters become views of it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "zero/partition.h"

namespace ds::zero {

// A parameter of the model. `tensor` shares its identity with the module's (set_data changes both).
struct Parameter {
  std::string name;
  at::Tensor tensor;
};

// Owns `flat` ([layout.numel], the model's dtype and device). Padding holds zeros. Not thread safe.
//
// A sharded bucket (stage 3) owns its rank's slice, and the memory of `flat` comes and goes: all views of it, those
// that autograd saved too, share one storage, so that they are whole again as soon as the storage is.
class ParameterBucket {
 public:
  // `values` are the float32 (or original dtype) values of the whole bucket, as made by `flatten`; the bucket is
  // allocated in `dtype` on the parameters' device and the parameters are re-pointed into it.
  ParameterBucket(BucketLayout layout, const std::vector<Parameter>& parameters, const at::Tensor& values,
                  at::ScalarType dtype);

  const BucketLayout& layout() const { return layout_; }
  // In the order of layout().segments.
  const std::vector<Parameter>& parameters() const { return parameters_; }
  // "3 (h.2.attn.qkv.weight, 5 more)", for messages.
  std::string describe(size_t index) const;
  // Has no memory while a sharded bucket is released.
  const at::Tensor& flat() const { return flat_; }
  // The part that rank `rank` owns: a view of flat() or, of a sharded bucket, what it keeps (`rank` is this one then).
  at::Tensor slice(int rank) const;

  // Keeps a copy of slice `rank` and releases the rest.
  void shard(int rank);
  bool sharded() const { return own_.defined(); }
  // Of a sharded bucket: takes memory for flat(), with unspecified contents; gives it back.
  void allocate();
  void release();
  bool allocated() const { return flat_.storage().nbytes() > 0; }
  // Bytes this rank holds now.
  int64_t held_bytes() const;

 private:
  BucketLayout layout_;
  std::vector<Parameter> parameters_;
  at::Tensor flat_;
  at::Tensor own_;  // of a sharded bucket
};

// Joins the current values of a bucket's parameters in one new flat tensor of `dtype`; padding is zero.
at::Tensor flatten(const BucketLayout& layout, const std::vector<Parameter>& parameters, at::ScalarType dtype);

// A view of `flat` with the shape of `like`, at a segment that covers a whole parameter.
at::Tensor view_of(const at::Tensor& flat, const Segment& segment, const at::Tensor& like);

}  // namespace ds::zero
