// Operators about memory, which the CPU's cannot do for tensors of cuda: empty, copies, storages.
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "core/text.h"
#include "tests/simulated_gpu/memory.h"
#include "tests/simulated_gpu/streams.h"
#include "tests/simulated_gpu/tensors.h"

namespace ds::simulated_gpu {
namespace {

using OptionalDtype = std::optional<at::ScalarType>;
using OptionalLayout = std::optional<at::Layout>;
using OptionalDevice = std::optional<at::Device>;

c10::Device device_or_current(OptionalDevice device) {
  return device && device->has_index() ? *device : current_device();
}

at::Tensor empty(at::IntArrayRef sizes, OptionalDtype dtype, OptionalLayout, OptionalDevice device, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  at::globalContext().lazyInitDevice(c10::kCUDA);  // from here on LibTorch asks whether memory is pinned
  const c10::DeviceGuard guard(device_or_current(device));
  return at::Tensor(at::detail::empty_generic(sizes, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                              at::dtype_or_default(dtype), format));
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, OptionalDtype dtype, OptionalLayout,
                         OptionalDevice device, std::optional<bool>) {
  at::globalContext().lazyInitDevice(c10::kCUDA);
  return empty_on_device(sizes, strides, at::dtype_or_default(dtype), device_or_current(device));
}

// As on CUDA a copy leaves the host alone only if it is asked to, host memory is pinned, and the bytes stay as they
// are.
bool runs_beside_host(const at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  const at::Tensor& host = to.is_cuda() ? from : to;
  return non_blocking && to.dtype() == from.dtype() && to.sizes() == from.sizes() && to.is_contiguous() &&
         from.is_contiguous() && Timeline::instance().is_pinned(reinterpret_cast<uintptr_t>(host.const_data_ptr()));
}

at::Tensor& copy(at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  const c10::Device device = to.is_cuda() ? to.device() : from.device();
  const bool crosses = to.device() != from.device();
  const std::string name = cat("copy to ", to.device(), " from ", from.device());
  // Addresses as they are now: what the tensors are given later is another matter.
  const auto work = [target = on_cpu(to), source = on_cpu(from)]() mutable {
    const at::NoGradGuard no_grad;
    target.copy_(source);
  };
  const std::vector<Access> accesses{access_of(from, false), access_of(to, true)};
  if (crosses && runs_beside_host(to, from, non_blocking)) {
    Timeline::instance().enqueue(current_number(device), name, accesses, work);
    return to;
  }
  const Point point = run_now(device, name, accesses, work);
  if (crosses) Timeline::instance().wait(point, name);
  return to;
}

at::Scalar value_of(const at::Tensor& tensor) {
  at::Scalar value;
  const Point point =
      run_now(tensor.device(), "item", {access_of(tensor, false)}, [&] { value = on_cpu(tensor).item(); });
  Timeline::instance().wait(point, "item");
  return value;
}

const at::Tensor& resize(const at::Tensor& tensor, at::IntArrayRef sizes, std::optional<at::MemoryFormat>) {
  if (tensor.sizes() == sizes) return tensor;
  const size_t needed = at::detail::computeStorageNbytesContiguous(sizes, tensor.element_size(),
                                                                   static_cast<size_t>(tensor.storage_offset()));
  if (needed > tensor.storage().nbytes()) {
    const at::Tensor before = tensor.alias();
    const at::Tensor fresh = empty_on_device(sizes, tensor.scalar_type(), tensor.device());
    const int64_t kept = std::min(before.numel(), fresh.numel());
    if (kept > 0) fresh.view(-1).narrow(0, 0, kept).copy_(before.view(-1).narrow(0, 0, kept));
    c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
    TORCH_CHECK(tensor.storage_offset() == 0, "resize_ of a part of a storage is not simulated");
    storage->set_data_ptr_noswap(std::move(fresh.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks()));
    storage->set_nbytes(needed);
  }
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

// A view may reach beyond the tensor that it is made from.
at::Tensor as_strided(const at::Tensor& tensor, at::IntArrayRef sizes, at::IntArrayRef strides,
                      std::optional<int64_t> offset) {
  return make_view(tensor, tensor.dtype(), offset.value_or(tensor.storage_offset()), sizes, strides);
}

at::Tensor& set_storage(at::Tensor& tensor, at::Storage source, int64_t offset, at::IntArrayRef sizes,
                        at::IntArrayRef strides) {
  if (strides.empty() && !sizes.empty()) {
    set_place(tensor, source, offset, sizes, c10::contiguous_strides(sizes));
  } else {
    set_place(tensor, source, offset, sizes, strides);
  }
  return tensor;
}

at::Tensor& set_whole_storage(at::Tensor& tensor, at::Storage source) {
  const auto count = static_cast<int64_t>(source.nbytes() / tensor.element_size());
  set_place(tensor, source, 0, {count}, {1});
  return tensor;
}

at::Tensor& set_tensor(at::Tensor& tensor, const at::Tensor& source) {
  set_place(tensor, source.storage(), source.storage_offset(), source.sizes(), source.strides());
  return tensor;
}

at::Tensor& set_nothing(at::Tensor& tensor) {
  return set_tensor(tensor, empty_on_device({0}, tensor.scalar_type(), tensor.device()));
}

void record_stream(at::Tensor& tensor, at::Stream stream) { use_on(tensor.storage().data_ptr(), number_of(stream)); }

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", TORCH_FN(empty));
  library.impl("empty_strided", TORCH_FN(empty_strided));
  library.impl("as_strided", TORCH_FN(as_strided));
  library.impl("copy_", TORCH_FN(copy));
  library.impl("_local_scalar_dense", TORCH_FN(value_of));
  library.impl("resize_", TORCH_FN(resize));
  library.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  library.impl("set_.source_Storage", TORCH_FN(set_whole_storage));
  library.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  library.impl("set_", TORCH_FN(set_nothing));
  library.impl("record_stream", TORCH_FN(record_stream));
}

}  // namespace
}  // namespace ds::simulated_gpu
