// Norms of flat gradients.
#pragma once

#include <ATen/core/Tensor.h>

namespace ds::zero {

// Sum of the squares of all elements, accumulated in float64 in an order that does not depend on threads. Not finite
// when an element is not finite. Any floating dtype, any device; no copy of the whole tensor is made.
double sum_of_squares(const at::Tensor& flat);

// First element that is infinite or NaN, or -1.
int64_t first_non_finite(const at::Tensor& flat);

}  // namespace ds::zero
