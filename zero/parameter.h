// A parameter of the model, and its place in a flat tensor.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/split/tensor_part.h"
#include "zero/partition.h"

namespace ds::zero {

// A parameter of the model. `tensor` shares its identity with the module's (set_data changes both). For a parameter
// that is split over a tensor axis, `tensor` is the leaf, which has this rank's part alone.
struct Parameter {
  std::string name;
  at::Tensor tensor;
  std::shared_ptr<const TensorPart> part = nullptr;  // which part of the parameter `tensor` is; null: all of it
  std::vector<std::string> other_names = {};         // the further names of a tied parameter, in module order

  // The first of the parameter's names for which `matches` is true, or null: all names of a tied parameter count.
  template <class Matches>
  const std::string* name_that(const Matches& matches) const {
    if (matches(name)) return &name;
    for (const std::string& other : other_names) {
      if (matches(other)) return &other;
    }
    return nullptr;
  }

  // The sizes of the full parameter.
  std::vector<int64_t> whole_sizes() const { return part ? part->whole_sizes() : tensor.sizes().vec(); }
};

// Joins values of a bucket's parameters, by default their current ones, in one new flat tensor; padding is zero. Where
// `value` is undefined the contents are unspecified.
at::Tensor flatten(
    const BucketLayout& layout, const std::vector<Parameter>& parameters, const at::TensorOptions& options,
    const std::function<at::Tensor(const Parameter&)>& value = [](const Parameter& p) { return p.tensor.detach(); });

// Points `tensor` at the memory of `values`, which has its shape; the identity by which modules know it stays. A tensor
// on the meta device moves to the device of `values`.
void point_to(const at::Tensor& tensor, const at::Tensor& values);

// Leaves `tensor`, whose memory is gone, without elements: an operator that reads it fails in its check of shapes,
// where it would be a fault.
void take_elements(const at::Tensor& tensor);

// A view of `flat` with the shape of `like`, at a segment that covers a whole parameter.
at::Tensor view_of(const at::Tensor& flat, const Segment& segment, const at::Tensor& like);

}  // namespace ds::zero
