// Dropout of split tensors draws what one process draws.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <mutex>

#include "tests/parallel/split_ranks.h"

namespace ds::parallel {
namespace {

// Results and gradients of `run` on tensors that are split along dimension 1, against plain ones with the same seed.
void expect_same_numbers(const std::function<at::Tensor(const at::Tensor&)>& run) {
  const at::Tensor values = at::arange(2 * 4 * 6 * 4, at::kDouble).view({2, 4, 6, 4}).sin() + 1.5;
  const at::Tensor plain = values.clone().requires_grad_();
  torch::manual_seed(5);
  const at::Tensor expected = run(plain);
  expected.square().sum().backward();
  EXPECT_GT((run(plain) - expected).abs().max().item<double>(), 0) << "it draws";
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    const std::shared_ptr<Axis> axis = make_axis(shared(communicator));
    const at::Tensor own = values.clone().requires_grad_();
    const at::Tensor split = distribute(own, axis, 1);
    at::Tensor result;
    {
      // Ranks are threads, which share the generator; what runs here runs no collective.
      static std::mutex mutex;
      const std::lock_guard lock(mutex);
      torch::manual_seed(5);
      result = run(split);
    }
    EXPECT_TRUE(is_split(result));
    EXPECT_LE(relative_error(whole(result), expected), 1e-12);
    result.square().sum().backward();
    EXPECT_LE(relative_error(own.grad(), plain.grad()), 1e-12);
    EXPECT_TRUE(axis->joined_operators().empty());
  });
}

TEST(Dropout, DrawsTheNumbersOfOneProcess) {
  expect_same_numbers([](const at::Tensor& x) { return at::dropout(x, 0.3, /*train=*/true); });
}

TEST(Dropout, OfAttentionWeightsToo) {
  expect_same_numbers([](const at::Tensor& x) { return at::scaled_dot_product_attention(x, x, x, {}, 0.3); });
}

TEST(Dropout, OfAttentionWeightsUnderAMaskOfBooleans) {
  const at::Tensor mask = at::ones({6, 6}, at::kBool).tril();
  expect_same_numbers([&](const at::Tensor& x) { return at::scaled_dot_product_attention(x, x, x, mask, 0.3); });
  // A mask that is split itself: of [2, 4, 6, 6], a row's own key always among them.
  expect_same_numbers([](const at::Tensor& x) {
    const at::Tensor own = at::eye(6).to(at::kBool);
    const at::Tensor kept = at::logical_or(x.detach().slice(3, 0, 1) > 1.3, own);
    return at::scaled_dot_product_attention(x, x, x, kept, 0.3);
  });
}

TEST(Dropout, OutsideOfTrainingChangesNothing) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    const std::shared_ptr<Axis> axis = make_axis(shared(communicator));
    const at::Tensor x = at::arange(24, at::kFloat).view({4, 6});
    const at::Tensor split = distribute(x, axis, 1);
    EXPECT_EQ(relative_error(whole(at::dropout(split, 0.3, /*train=*/false)), x), 0);
    EXPECT_EQ(relative_error(whole(at::dropout(split, 0.0, /*train=*/true)), x), 0);
    EXPECT_EQ(whole(at::dropout(split, 1.0, /*train=*/true)).abs().max().item<float>(), 0);
  });
}

}  // namespace
}  // namespace ds::parallel
