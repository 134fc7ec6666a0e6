// Finding the elements of largest magnitude.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace ds::compression {

// int64 [count]: positions of the `count` elements of largest magnitude of `values`, flat and without NaN; of equal
// ones those that come first. 0 <= count <= numel, less than 2^31. Needs memory for one more tensor like `values`; on a
// device, where it does not wait, 20 bytes an element. Values on a device may be NaN: what is found then is some
// `count` elements.
at::Tensor largest_elements(const at::Tensor& values, int64_t count);

}  // namespace ds::compression
