// The memory of a tensor's storage, which all its views share: given and taken while the tensors stay.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/StorageImpl.h>

#include <cstddef>
#include <utility>

namespace ds {

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

}  // namespace ds
