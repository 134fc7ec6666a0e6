// A short number for the values of a tensor, by which ranks that should hold the same can be compared.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace ds::zero {

// The digest of a tensor's shape, dtype and of up to 1024 elements, evenly spread: equal for equal tensors. Waits for
// the device.
uint64_t digest_of(const at::Tensor& values);
// Another digest, of as many elements of a tensor of integers: int64 [] on their device. Does not wait.
at::Tensor device_digest_of(const at::Tensor& integers);
// A checksum of all bits of a strided tensor: int64 [] on its device. It changes with any one bit, and with rows that
// change places, by far. Does not wait.
at::Tensor device_checksum_of(const at::Tensor& values);
// A checksum of a flat tensor of integers: int64 [] on its device, the same number on a host and on a GPU. It changes
// with any one element. Does not wait.
at::Tensor checksum_in_rows(const at::Tensor& words);
// The sum of as many elements of a tensor of floating-point numbers, weighted by their places, and the sum of their
// magnitudes, weighted alike: float64 [2] on their device. Tensors that are equal but for rounding have sums whose
// difference is small beside the second number. Does not wait.
at::Tensor device_sums_of(const at::Tensor& numbers);

// A number for the values of a tensor of floating-point or boolean type: float64 [] on their device, of as many
// elements. It is nearly the same for tensors that differ in the last bits of their elements, and by far another one
// for other values: a projection that scales with 1, and the logarithm of their mean magnitude. Does not wait.
at::Tensor device_projection_of(const at::Tensor& values);

}  // namespace ds::zero
