// A short number for what a tensor holds, by which ranks that should hold the same can be compared.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace ds::zero {

// Of shape and dtype and of up to 1024 elements, evenly spread: equal for equal tensors. Waits for the device.
uint64_t digest_of(const at::Tensor& values);
// Of as many elements of a tensor of integers, another number, int64 [] on their device. Does not wait.
at::Tensor device_digest_of(const at::Tensor& integers);

}  // namespace ds::zero
