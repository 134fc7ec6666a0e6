// What a checkpointed region gives back: outputs with and without a graph, changed in place, used more than once.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <utility>

#include "dsengine/activation_checkpoint.h"
#include "tests/recompute/region_gradients.h"

namespace ds::recompute {
namespace {

TEST(RegionOutputs, WithoutGradientsItIsThePlainCall) {
  const at::Tensor weight = leaf({6}, 0.1);
  int runs = 0;
  const auto count = [&](const at::Tensor& t) {
    ++runs;
    return t * weight.detach();
  };
  checkpoint(count, waves({6}, 0.2));
  const torch::NoGradGuard no_grad;
  const at::Tensor out = checkpoint([&](const at::Tensor& t) { return t * weight; }, weight);
  EXPECT_FALSE(out.requires_grad());
  EXPECT_TRUE(torch::equal(out, weight * weight));
  EXPECT_EQ(runs, 1);
}

TEST(RegionOutputs, NothingThatRequiresAGradient) {
  at::Tensor out = checkpoint([](const at::Tensor& t) { return (t * 2).view({2, 3}); }, waves({6}, 0.2));
  EXPECT_FALSE(out.requires_grad());
  const at::Tensor weight = leaf({3}, 0.1);
  out.mul_(weight);  // no view of what was made without graph
  out.sum().backward();
  EXPECT_TRUE(weight.grad().defined());
}

TEST(RegionOutputs, GradOfSomeInputsOnly) {
  const at::Tensor x = leaf({6}, 0.2);
  const at::Tensor weight = leaf({6}, 0.4);
  const at::Tensor out = checkpoint([weight](const at::Tensor& t) { return t * weight; }, x);
  const auto gradients = torch::autograd::grad({out.sum()}, {x});
  EXPECT_TRUE(torch::equal(gradients[0], weight));
  EXPECT_FALSE(weight.grad().defined());
  EXPECT_FALSE(x.grad().defined());
}

TEST(RegionOutputs, RetainedGraphsAreComputedAgain) {
  const at::Tensor x = leaf({6}, 0.2);
  int runs = 0;
  const auto count = [&runs](const at::Tensor& t) {
    ++runs;
    return t.exp();
  };
  const at::Tensor out = checkpoint(count, x).sum();
  out.backward({}, /*retain_graph=*/true);
  const at::Tensor once = x.grad().clone();
  out.backward();
  EXPECT_EQ(runs, 3);
  EXPECT_TRUE(torch::equal(x.grad(), once * 2));
  EXPECT_THROW(out.backward(), c10::Error);
}

TEST(RegionOutputs, FreshOutputsMayBeChangedInPlace) {
  const at::Tensor x = leaf({2, 6}, 0.2);
  expect_same_gradients(
      [&](const Around& around) {
        const at::Tensor out = around([](const Tensors& in) { return Tensors{in[0].sin().view({12})}; }, {x})[0];
        out.mul_(3);
        out.narrow(0, 2, 4).add_(out.narrow(0, 6, 4));
        return out.sin().sum();
      },
      {x});
}

TEST(RegionOutputs, OutputsThatAreInputsOrCapturedTensors) {
  const at::Tensor x = leaf({6}, 0.2);
  const at::Tensor weight = leaf({6}, 0.4);
  expect_same_gradients(
      [&](const Around& around) {
        const Tensors out = around(
            [weight](const Tensors& in) {
              return Tensors{in[0], weight, in[0].view({2, 3})};
            },
            {x});
        return (out[0] * out[1]).sum() + out[2].pow(2).sum();
      },
      {x, weight});
  const auto identity = [](const at::Tensor& t) { return t.view({2, 3}); };
  EXPECT_THROW(checkpoint(identity, x.exp()).add_(1), c10::Error);
  EXPECT_THROW(checkpoint([weight](const at::Tensor&) { return weight; }, x).add_(1), c10::Error);
  const auto halves = [](const at::Tensor& t) {
    const at::Tensor made = t.exp();
    return std::make_pair(made, made.narrow(0, 0, 3));
  };
  EXPECT_THROW(checkpoint(halves, x).second.add_(1), c10::Error);
  // Without a graph it is seen by the count of changes.
  const at::Tensor hidden = x.exp();
  const at::Tensor same = checkpoint(identity, hidden);
  {
    const torch::NoGradGuard no_grad;
    same.detach().add_(1);
  }
  EXPECT_ANY_THROW(same.sum().backward());
}

}  // namespace
}  // namespace ds::recompute
