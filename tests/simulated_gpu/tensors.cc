#include "tests/simulated_gpu/tensors.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>

#include "tests/simulated_gpu/memory.h"
#include "tests/simulated_gpu/streams.h"

namespace ds::simulated_gpu {
namespace {

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::CUDA);

}  // namespace

at::Tensor empty_on_device(at::IntArrayRef sizes, at::ScalarType dtype, c10::Device device) {
  const c10::DeviceGuard guard(device);
  return at::Tensor(at::detail::empty_generic(sizes, device_allocator(), kKeys, dtype, std::nullopt));
}

at::Tensor empty_on_device(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype, c10::Device device) {
  const c10::DeviceGuard guard(device);
  return at::Tensor(at::detail::empty_strided_generic(sizes, strides, device_allocator(), kKeys, dtype));
}

at::Tensor on_cpu(const at::Tensor& tensor) {
  const Access bytes = access_of(tensor, false);
  const auto storage = reinterpret_cast<uintptr_t>(tensor.storage().data());
  TORCH_CHECK(tensor.numel() == 0 || (bytes.begin >= storage && bytes.end <= storage + tensor.storage().nbytes()),
              "an operation on a tensor of ", tensor.sizes(), " whose storage has ", tensor.storage().nbytes(),
              " bytes");
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
}

Access access_of(const at::Tensor& tensor, bool write) {
  if (tensor.numel() == 0) return {};
  const auto begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  return {begin, begin + (static_cast<size_t>(last) + 1) * tensor.element_size(), write};
}

void set_place(const at::Tensor& tensor, const c10::Storage& storage, int64_t offset, at::IntArrayRef sizes,
               at::IntArrayRef strides) {
  c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  if (!storage.is_alias_of(tensor.storage())) impl->set_storage_keep_dtype(storage);
  impl->set_storage_offset(offset);
  impl->set_sizes_and_strides(sizes, strides);
}

at::Tensor make_view(const at::Tensor& base, caffe2::TypeMeta dtype, int64_t offset, at::IntArrayRef sizes,
                     at::IntArrayRef strides) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()),
                                                       base.key_set(), dtype);
  set_place(view, base.storage(), offset, sizes, strides);
  return view;
}

Point run_now(c10::Device device, const std::string& name, const std::vector<Access>& accesses,
              std::function<void()> run) {
  const Point point = Timeline::instance().enqueue(current_number(device), name, accesses, std::move(run));
  Timeline::instance().run_until(point);
  return point;
}

}  // namespace ds::simulated_gpu
