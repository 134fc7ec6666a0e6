// Who else can reach the memory of a tensor, and whether it was changed in place.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace ds {

// Tells of each of `tensors` whether somebody else can reach its memory: holds the tensor itself, another tensor on its
// storage, or the base that it is a view of; also whether two of `tensors` share memory. The vector is the caller's
// only hold on them. What autograd has saved of a tensor is another tensor on its storage.
std::vector<bool> find_shared(const std::vector<at::Tensor>& tensors);

// Whether the tensor's memory was given by the program (torch::from_blob, a mapped file), which may write to it without
// any tensor.
bool has_given_memory(const at::Tensor& tensor);

// autograd's count of changes in place; 0 for tensors without one.
int64_t version_of(const at::Tensor& tensor);

}  // namespace ds
