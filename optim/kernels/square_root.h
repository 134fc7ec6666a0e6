// Square roots of an array, correctly rounded. Torch-free.
#pragma once

#include <cstdint>

namespace ds::optimizers {

// roots[i] = sqrt(values[i]); the arrays may be the same. The same bits on every machine, which LibTorch's vectorised
// sqrt on a CPU does not promise (MKL's may be an ulp off).
void square_roots(const float* values, int64_t count, float* roots);

}  // namespace ds::optimizers
