#include "zero/parameter.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>

namespace ds::zero {

at::Tensor view_of(const at::Tensor& flat, const Segment& segment, const at::Tensor& like) {
  return flat.narrow(0, segment.slice_offset, segment.length).view(like.sizes());
}

void point_to(const at::Tensor& tensor, const at::Tensor& values) {
  if (!tensor.is_meta()) {
    tensor.set_data(values);
    return;
  }
  // set_data() does not leave the meta device.
  c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  impl->_change_backend_component_keys(values.device());
  impl->set_storage_and_dtype(values.storage(), values.dtype());
  impl->set_sizes_and_strides(values.sizes(), values.strides(), values.storage_offset());
}

void take_elements(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  const at::RecordFunctionGuard not_intercepted(/*is_enabled=*/false);
  tensor.set_data(at::empty({0}, tensor.options().requires_grad(false)));
}

at::Tensor flatten(const BucketLayout& layout, const std::vector<Parameter>& parameters,
                   const at::TensorOptions& options, const std::function<at::Tensor(const Parameter&)>& value) {
  const at::NoGradGuard no_grad;
  at::Tensor flat = at::empty({layout.numel}, options);
  for (const auto& [offset, length] : padding_of(layout)) flat.narrow(0, offset, length).zero_();
  for (const Segment& segment : layout.segments) {
    const Parameter& parameter = parameters[static_cast<size_t>(segment.parameter)];
    const at::Tensor from = value(parameter);
    if (from.defined()) view_of(flat, segment, parameter.tensor).copy_(from);
  }
  return flat;
}

}  // namespace ds::zero
