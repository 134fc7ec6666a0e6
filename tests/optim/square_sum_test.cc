// Sums of squares: against float64, whatever the instruction set, threads, type and length.
#include <gtest/gtest.h>

#include <limits>

#include "tests/optim/sharded_model.h"
#include "tests/optim/vector_targets.h"
#include "zero/square_sum.h"

namespace ds::optimizers {
namespace {

double exact_sum(const at::Tensor& values) { return values.to(at::kDouble).square().sum().item<double>(); }

class SquareSum : public testing::TestWithParam<int64_t> {
 protected:
  const WithTarget target_{GetParam()};
};

TEST_P(SquareSum, AgreesWithFloat64) {
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const int64_t numel : {0, 1, 3, 15, 16, 17, 1001, 65536, 65537, 200003}) {
      for (const int64_t offset : {0, 1}) {
        const at::Tensor values = uniform(3, numel + offset).to(type).narrow(0, offset, numel);
        const double exact = exact_sum(values);
        EXPECT_NEAR(zero::sum_of_squares(values), exact, 1e-12 * exact) << numel << " of " << type;
      }
    }
  }
}

// Squares that float32 cannot hold.
TEST_P(SquareSum, HasTheRangeOfFloat64) {
  for (const double size : {1e-30, 1e30}) {
    const at::Tensor values = uniform(3, 1000) * size;
    for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
      const double exact = exact_sum(values.to(type));
      EXPECT_NEAR(zero::sum_of_squares(values.to(type)), exact, 1e-12 * exact) << type;
    }
  }
}

TEST_P(SquareSum, IsNotFiniteWhereverAnElementIsNot) {
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const int64_t place : {0, 37, 99}) {
      for (const float bad : {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                              std::numeric_limits<float>::quiet_NaN()}) {
        at::Tensor values = uniform(3, 100).to(type);
        values[place] = bad;
        EXPECT_FALSE(std::isfinite(zero::sum_of_squares(values))) << bad << " at " << place << " of " << type;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Vectors, SquareSum, testing::ValuesIn(hwy::SupportedAndGeneratedTargets()),
                         [](const auto& test) { return std::string(hwy::TargetName(test.param)); });

TEST(SquareSumOfATensor, ThreadsDoNotChangeABit) {
  const int threads = at::get_num_threads();
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kHalf}) {
    const at::Tensor values = uniform(3, 1234567).to(type);
    at::set_num_threads(1);
    const double alone = zero::sum_of_squares(values);
    for (const int count : {2, 3}) {
      at::set_num_threads(count);
      EXPECT_EQ(zero::sum_of_squares(values), alone);
    }
    at::set_num_threads(threads);
  }
}

TEST(SquareSumOfATensor, TakesOtherTensorsToo) {
  const at::Tensor values = uniform(3, 2000).view({1000, 2});
  EXPECT_NEAR(zero::sum_of_squares(values.select(1, 0)), exact_sum(values.select(1, 0)), 1e-9);
  EXPECT_NEAR(zero::sum_of_squares(values.to(at::kDouble).flatten()), exact_sum(values), 1e-9);
}

}  // namespace
}  // namespace ds::optimizers
