#include "optim/newton_schulz.h"

#include <gtest/gtest.h>

#include "core/check.h"
#include "tests/optim/sharded_model.h"

namespace ds::optimizers {
namespace {

class Orthogonalize : public testing::TestWithParam<std::pair<int64_t, int64_t>> {};

TEST_P(Orthogonalize, BringsSingularValuesNearOne) {
  const auto [rows, cols] = GetParam();
  const at::Tensor matrix = uniform(77, rows * cols).view({rows, cols});
  for (const NewtonSchulzMethod method : {NewtonSchulzMethod::kStandard, NewtonSchulzMethod::kGram}) {
    const at::Tensor result = orthogonalize(matrix, method);
    ASSERT_EQ(result.sizes(), matrix.sizes());
    const at::Tensor values = at::linalg_svdvals(result);
    EXPECT_GT(values.min().item<double>(), 0.6);
    EXPECT_LT(values.max().item<double>(), 1.3);
  }
}

TEST_P(Orthogonalize, BothFormsAreTheSamePolynomial) {
  const auto [rows, cols] = GetParam();
  const at::Tensor matrix = uniform(78, rows * cols).view({rows, cols}).to(at::kDouble);
  const at::Tensor standard = orthogonalize(matrix, NewtonSchulzMethod::kStandard);
  const at::Tensor gram = orthogonalize(matrix, NewtonSchulzMethod::kGram);
  EXPECT_LT((standard - gram).abs().max().item<double>(), 1e-9);
}

INSTANTIATE_TEST_SUITE_P(Shapes, Orthogonalize,
                         testing::Values(std::pair(16, 40), std::pair(40, 16), std::pair(3, 90)));

TEST(NewtonSchulz, TakesBatchesMatrixByMatrix) {
  const at::Tensor batch = uniform(5, 3 * 4 * 6).view({3, 4, 6});
  const at::Tensor result = orthogonalize(batch, NewtonSchulzMethod::kGram);
  for (int64_t i = 0; i < 3; ++i) {
    EXPECT_TRUE(at::allclose(result[i], orthogonalize(batch[i], NewtonSchulzMethod::kGram), 1e-5, 1e-6));
  }
}

TEST(NewtonSchulz, ZeroStaysZero) {
  const at::Tensor result = orthogonalize(at::zeros({3, 5}), NewtonSchulzMethod::kGram);
  EXPECT_EQ(result.abs().max().item<double>(), 0.0);
}

TEST(NewtonSchulz, RefusesAVector) {
  EXPECT_THROW(orthogonalize(at::zeros({3}), NewtonSchulzMethod::kGram), UsageError);
}

}  // namespace
}  // namespace ds::optimizers
