// Sum of squares of an array, in float64. Torch-free.
#pragma once

#include <cstdint>

#include "optim/kernels/slice_arrays.h"

namespace ds::optimizers {

// The sum of the squares of `count` values of `type`. Not finite if and only if a value is not. The order of the
// additions depends on the machine's vector length, on nothing else.
double square_sum(const void* values, FloatFormat type, int64_t count);

}  // namespace ds::optimizers
