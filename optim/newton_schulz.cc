#include "optim/newton_schulz.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/matmul.h>

#include "core/check.h"
#include "core/tensor_check.h"

namespace ds::optimizers {
namespace {

constexpr double kA = 3.4445;
constexpr double kB = -4.7750;
constexpr double kC = 2.0315;
constexpr int kSteps = 5;
constexpr int kRestart = 2;  // the Gram form forms its matrix anew at this step, which keeps float16 stable
constexpr double kNormEpsilon = 1e-7;

at::ScalarType compute_type(const at::Tensor& matrix, NewtonSchulzMethod method) {
  if (matrix.is_cpu() || matrix.scalar_type() == at::kDouble) return matrix.scalar_type();
  return method == NewtonSchulzMethod::kGram ? at::kHalf : at::kBFloat16;
}

// Divided by its Frobenius norm, so that no singular value is above 1.
at::Tensor normalize(const at::Tensor& x) {
  return x / at::linalg_vector_norm(x, 2, at::IntArrayRef{-2, -1}, /*keepdim=*/true).add_(kNormEpsilon);
}

at::Tensor iterate_standard(at::Tensor x) {
  for (int i = 0; i < kSteps; ++i) {
    const at::Tensor gram = at::matmul(x, x.mT());
    const at::Tensor polynomial = gram * kB + at::matmul(gram * kC, gram);
    x = x * kA + at::matmul(polynomial, x);
  }
  return x;
}

// x [n, m] with n < m. Each step multiplies x by a I + Z, Z = b R + c R R; the products are collected in Q [n, n].
at::Tensor iterate_gram(at::Tensor x) {
  at::Tensor gram = at::matmul(x, x.mT());
  at::Tensor product;
  for (int i = 0; i < kSteps; ++i) {
    if (i == kRestart) {
      x = at::matmul(product, x);
      gram = at::matmul(x, x.mT());
      product.reset();
    }
    const at::Tensor z = gram * kB + at::matmul(gram * kC, gram);
    if (product.defined()) {
      product = product * kA + at::matmul(z, product);
    } else {
      product = z.clone();
      product.diagonal(0, -2, -1).add_(kA);
    }
    if (i < kSteps - 1 && i + 1 != kRestart) {
      const at::Tensor moved = gram * kA + at::matmul(z, gram);
      gram = moved * kA + at::matmul(z, moved);
    }
  }
  return at::matmul(product, x);
}

}  // namespace

at::Tensor orthogonalize(const at::Tensor& matrix, NewtonSchulzMethod method) {
  require(matrix.defined() && matrix.dim() >= 2 && at::isFloatingType(matrix.scalar_type()),
          "orthogonalize: expected a matrix of floating point, found ", describe(matrix));
  const bool tall = matrix.size(-2) > matrix.size(-1);
  const bool square = matrix.size(-2) == matrix.size(-1);
  const at::Tensor wide = normalize(tall ? matrix.mT() : matrix).to(compute_type(matrix, method));
  const at::Tensor result =
      method == NewtonSchulzMethod::kGram && !square ? iterate_gram(wide) : iterate_standard(wide);
  return (tall ? result.mT() : result).to(matrix.scalar_type());
}

}  // namespace ds::optimizers
