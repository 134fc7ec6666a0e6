// Finds the matrix that another one is the transposed view of: LibTorch's own Linear hands its weight to operators so.
#pragma once

#include <ATen/core/Tensor.h>

namespace ds {

// Returns the tensor that `matrix` is .t() of, the same object; undefined: it is none.
at::Tensor base_of_transposed(const at::Tensor& matrix);

}  // namespace ds
