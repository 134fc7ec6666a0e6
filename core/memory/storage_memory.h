// The memory of a tensor's storage, which all its views share: given and taken while the tensors stay.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/StorageImpl.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

namespace ds {

// Whether the two are one storage; for memory that must not be read, where is_alias_of() throws.
inline bool is_same_storage(const at::Storage& a, const at::Storage& b) {
  return a.unsafeGetStorageImpl() == b.unsafeGetStorageImpl();
}

// Makes `memory` of `bytes` bytes the memory of the tensor's storage, in place of what it has.
inline void give_storage(const at::Tensor& tensor, c10::DataPtr memory, size_t bytes) {
  c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(std::move(memory));
  storage->set_nbytes(bytes);
}

// Takes the memory away from the tensor's storage. Its tensors cannot be read until they are given memory again.
inline c10::DataPtr take_storage(const at::Tensor& tensor) {
  c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
  storage->set_nbytes(0);
  return storage->set_data_ptr(c10::DataPtr(nullptr, tensor.device()));
}

// Storage without memory on `device`: whoever asks for a tensor's memory there, an operator, torch::save or a program
// that takes the pointer, gets a c10::Error with `text`, which can be set anew.
inline void set_unreadable_text(const at::Storage& storage, std::string text) {
  storage.unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(std::move(text));
}
// Makes such a storage. `bytes`: its size as far as views of it are concerned.
inline at::Storage unreadable_storage(at::Device device, size_t bytes, std::string text) {
  at::Storage storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                                            c10::DataPtr(nullptr, device), /*allocator=*/nullptr,
                                                            /*resizable=*/false));
  set_unreadable_text(storage, std::move(text));
  return storage;
}

// Whether the tensor has a storage with memory.
inline bool has_memory(const at::Tensor& tensor) {
  return tensor.has_storage() &&
         tensor.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get() != nullptr;
}

// A contiguous tensor of `sizes` in `storage`, with dtype and device of `options`, without history and gradient.
inline at::Tensor tensor_in(at::Storage storage, c10::IntArrayRef sizes, const at::TensorOptions& options) {
  at::Tensor result =
      at::detail::make_tensor<at::TensorImpl>(std::move(storage), options.computeDispatchKey(), options.dtype());
  result.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return result;
}

// A contiguous tensor of `sizes`, of dtype and device of `like`, in a storage that throws `text`.
inline at::Tensor unreadable_tensor(const at::Tensor& like, c10::IntArrayRef sizes, std::string text) {
  const auto bytes = static_cast<size_t>(c10::multiply_integers(sizes)) * like.element_size();
  return tensor_in(unreadable_storage(like.device(), bytes, std::move(text)), sizes, like.options());
}

// A flat tensor that has no memory before give_storage() gives it some. It must not be read until then.
inline at::Tensor tensor_without_memory(int64_t numel, const at::TensorOptions& options) {
  const size_t bytes = static_cast<size_t>(numel) * options.dtype().itemsize();
  at::Storage storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                                            c10::DataPtr(nullptr, options.device()),
                                                            /*allocator=*/nullptr, /*resizable=*/false));
  return tensor_in(std::move(storage), {numel}, options);
}

}  // namespace ds
