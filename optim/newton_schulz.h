// Orthogonalisation of a matrix by Newton-Schulz iteration, the heart of Muon (kellerjordan.github.io/posts/muon; Gram
// form: tridao.me/blog/2026/gram-newton-schulz).
#pragma once

#include <ATen/core/Tensor.h>

namespace ds::optimizers {

// kStandard iterates on the matrix, in bfloat16 on CUDA; kGram on the Gram matrix of its short side, in float16 on CUDA
// (fewer operations on rectangular matrices; square ones take the standard form). On the CPU, and for float64, both run
// in the dtype of the matrix.
enum class NewtonSchulzMethod { kStandard, kGram };

// For a matrix [rows, cols], the one of its dtype with the same singular vectors and with singular values near 1
// (0.7 to 1.2). Five steps with (a, b, c) = (3.4445, -4.7750, 2.0315).
at::Tensor orthogonalize(const at::Tensor& matrix, NewtonSchulzMethod method);

}  // namespace ds::optimizers
