// Gradients of checkpointed functions against plain autograd, bit for bit.
#include "dsengine/activation_checkpoint.h"

#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <tuple>
#include <vector>

#include "tests/recompute/region_gradients.h"
#include "tests/support/autocast_scope.h"

namespace ds::recompute {
namespace {

TEST(ActivationCheckpoint, GradientsOfInputsAndParameters) {
  torch::nn::Sequential net(torch::nn::Linear(5, 8), torch::nn::LayerNorm(torch::nn::LayerNormOptions({8})),
                            torch::nn::GELU(), torch::nn::Linear(8, 3));
  const at::Tensor x = leaf({4, 5}, 0.3);
  Tensors leaves = net->parameters();
  leaves.push_back(x);
  expect_same_gradients(
      [&](const Around& around) {
        return around([net](const Tensors& in) mutable { return Tensors{net->forward(in[0])}; }, {x.sin()})[0]
            .pow(2)
            .sum();
      },
      leaves);
}

TEST(ActivationCheckpoint, InputsThatNeedNoGradient) {
  const at::Tensor weight = leaf({5, 5}, 0.1);
  const at::Tensor x = waves({4, 5}, 0.3);
  const at::Tensor index = torch::tensor({0, 2, 1}, torch::kLong);
  expect_same_gradients(
      [&](const Around& around) {
        return around(
                   [weight](const Tensors& in) { return Tensors{in[0].matmul(weight).index_select(0, in[1]).tanh()}; },
                   {x, index})[0]
            .sum();
      },
      {weight});
}

TEST(ActivationCheckpoint, DropoutDrawsTheSameNumbers) {
  const at::Tensor x = leaf({40, 5}, 0.3);
  expect_same_gradients(
      [&](const Around& around) {
        const at::Tensor hidden =
            around([](const Tensors& in) { return Tensors{torch::dropout(in[0], 0.4, true).exp()}; }, {x})[0];
        return torch::dropout(hidden, 0.2, true).sum();
      },
      {x});
}

TEST(ActivationCheckpoint, WithoutTheGeneratorsStateOtherNumbersAreDrawn) {
  const at::Tensor x = leaf({400}, 0.3);
  const auto drop = [](const at::Tensor& t) { return torch::dropout(t, 0.5, true); };
  const at::Tensor out = checkpoint_with({.preserve_rng_state = false}, drop, x);
  out.sum().backward();
  EXPECT_FALSE(torch::equal(x.grad() * x, out));
  x.mutable_grad().reset();
  const at::Tensor again = checkpoint(drop, x);
  again.sum().backward();
  EXPECT_TRUE(torch::equal(x.grad() * x, again));
}

TEST(ActivationCheckpoint, CapturedTensorsOneMadeFromTheOther) {
  const at::Tensor weight = leaf({6}, 0.1);
  const at::Tensor x = leaf({6}, 0.2);
  expect_same_gradients(
      [&](const Around& around) {
        const at::Tensor ancestor = weight.exp();
        const at::Tensor descendant = ancestor.sin();
        const at::Tensor out = around(
            [ancestor, descendant, weight](const Tensors& in) {
              return Tensors{in[0] * descendant + ancestor.cos() * descendant - weight.tanh()};
            },
            {x})[0];
        return out.sum();
      },
      {weight, x});
}

TEST(ActivationCheckpoint, CapturedViews) {
  const at::Tensor weight = leaf({2, 6}, 0.1);
  const at::Tensor x = leaf({6}, 0.2);
  expect_same_gradients(
      [&](const Around& around) {
        const at::Tensor hidden = weight.exp();
        const at::Tensor row = hidden[1];
        return around([row](const Tensors& in) { return Tensors{in[0] * row}; }, {x})[0].sum() + row.pow(3).sum();
      },
      {weight, x});
}

TEST(ActivationCheckpoint, AWeightAndASubmoduleUsedInTwoRegionsAndOutside) {
  const auto shared = std::make_shared<torch::nn::LinearImpl>(6, 6);
  const at::Tensor x = leaf({3, 6}, 0.2);
  Tensors leaves = shared->parameters();
  leaves.push_back(x);
  std::vector<int> fired(leaves.size(), 0);
  for (size_t i = 0; i < leaves.size(); ++i) leaves[i].register_hook([&fired, i](at::Tensor) { ++fired[i]; });
  const auto train = [&](const Around& around) {
    const RegionFunction block = [shared](const Tensors& in) { return Tensors{shared->forward(in[0]).tanh()}; };
    const at::Tensor first = around(block, {x})[0];
    const at::Tensor second = around(block, {shared->forward(first)})[0];
    return torch::linear(second, shared->weight).pow(2).sum();
  };
  train(plainly).backward();
  EXPECT_EQ(fired, std::vector<int>(leaves.size(), 1));
  Tensors expected;
  for (at::Tensor& each : leaves) expected.push_back(std::exchange(each.mutable_grad(), at::Tensor()));
  train(as_region).backward();
  EXPECT_EQ(fired, std::vector<int>(leaves.size(), 2)) << "a hook runs once in a backward pass";
  for (size_t i = 0; i < leaves.size(); ++i) {
    EXPECT_TRUE(torch::allclose(leaves[i].grad(), expected[i], 1e-6, 1e-7)) << i;  // sums in another order
  }
}

TEST(ActivationCheckpoint, HooksOfCapturedAndInputTensorsRunOnce) {
  const at::Tensor weight = leaf({6}, 0.1);
  const at::Tensor captured = weight.exp();
  const at::Tensor input = weight.sin();
  int captured_hook = 0;
  int input_hook = 0;
  captured.register_hook([&](at::Tensor) { ++captured_hook; });
  input.register_hook([&](at::Tensor) { ++input_hook; });
  const at::Tensor out = checkpoint([captured](const at::Tensor& x) { return x * captured * captured; }, input);
  int output_hook = 0;
  out.register_hook([&](at::Tensor) { ++output_hook; });
  out.sum().backward();
  EXPECT_EQ(captured_hook, 1);
  EXPECT_EQ(input_hook, 1);
  EXPECT_EQ(output_hook, 1);
}

TEST(ActivationCheckpoint, SeveralOutputsOfWhichSomeGetNoGradient) {
  const at::Tensor x = leaf({6}, 0.2);
  const at::Tensor y = leaf({6}, 0.9);
  expect_same_gradients(
      [&](const Around& around) {
        const Tensors out = around(
            [](const Tensors& in) {
              return Tensors{in[0] * in[1], at::Tensor(), in[0].exp(), in[1].argmax(), in[1].detach() * 2};
            },
            {x, y});
        EXPECT_FALSE(out[1].defined());
        EXPECT_FALSE(out[3].requires_grad());
        EXPECT_EQ(out[3].scalar_type(), torch::kLong);
        return out[0].sum() * (out[3] + 1) + out[4].sum();
      },
      {x, y});
}

TEST(ActivationCheckpoint, UndefinedInputs) {
  const at::Tensor x = leaf({6}, 0.2);
  const auto add = [](const at::Tensor& a, const at::Tensor& b) { return b.defined() ? a + b : a * 2; };
  checkpoint(add, x, at::Tensor()).sum().backward();
  EXPECT_TRUE(torch::equal(x.grad(), torch::full({6}, 2.0)));
}

TEST(ActivationCheckpoint, NestedResultsAndOtherArguments) {
  torch::nn::LSTM lstm(torch::nn::LSTMOptions(5, 4).num_layers(2));
  const at::Tensor x = leaf({3, 2, 5}, 0.2);
  const std::tuple<at::Tensor, at::Tensor> state = {leaf({2, 2, 4}, 0.4), leaf({2, 2, 4}, 0.6)};
  Tensors leaves = lstm->parameters();
  leaves.insert(leaves.end(), {x, std::get<0>(state), std::get<1>(state)});
  const auto forward = [lstm](const at::Tensor& sequence,
                              const std::optional<std::tuple<at::Tensor, at::Tensor>>& begin, double scale) mutable {
    auto [out, end] = lstm->forward(sequence * scale, begin);
    return std::make_tuple(out, end, scale);
  };
  const auto gradients = [&](bool region) {
    for (const at::Tensor& each : leaves) each.mutable_grad().reset();
    const std::optional<std::tuple<at::Tensor, at::Tensor>> begin = state;
    const std::tuple<at::Tensor, std::tuple<at::Tensor, at::Tensor>, double> result =
        region ? checkpoint(forward, x, begin, 1.5) : std::decay_t<decltype(forward)>(forward)(x, begin, 1.5);
    EXPECT_EQ(std::get<2>(result), 1.5);
    const auto& [hidden, cell] = std::get<1>(result);
    (std::get<0>(result).pow(2).sum() + hidden.sum() * cell.exp().sum()).backward();
    Tensors all;
    for (const at::Tensor& each : leaves) all.push_back(each.grad());
    return all;
  };
  const Tensors expected = gradients(false);
  const Tensors found = gradients(true);
  for (size_t i = 0; i < leaves.size(); ++i) EXPECT_TRUE(torch::allclose(found[i], expected[i], 1e-5, 1e-6)) << i;
}

TEST(ActivationCheckpoint, PairsAndVectors) {
  const at::Tensor x = leaf({6}, 0.2);
  const auto split = [](const std::vector<at::Tensor>& in) { return std::make_pair(in[0].sin(), in[0] + in[1]); };
  const std::pair<at::Tensor, at::Tensor> out = checkpoint(split, std::vector<at::Tensor>{x, x});
  (out.first + out.second).sum().backward();
  EXPECT_TRUE(torch::equal(x.grad(), x.cos() + 2));
}

TEST(ActivationCheckpoint, NestedRegions) {
  torch::nn::Linear outer(6, 6);
  torch::nn::Linear inner(6, 6);
  const at::Tensor x = leaf({3, 6}, 0.2);
  int runs = 0;
  const auto deep = [&runs, inner = inner.ptr()](const at::Tensor& t) {
    ++runs;
    return torch::dropout(inner->forward(t).tanh(), 0.3, true);
  };
  const auto network = [outer = outer.ptr(), deep](const at::Tensor& t, bool regions) {
    const at::Tensor hidden = outer->forward(t).sin();
    const at::Tensor first = regions ? checkpoint(deep, hidden) : deep(hidden);
    return (regions ? checkpoint(deep, first) : deep(first)) + outer->weight.sum();
  };
  Tensors leaves = {outer->weight, outer->bias, inner->weight, inner->bias, x};
  const auto gradients = [&](bool regions) {
    for (const at::Tensor& each : leaves) each.mutable_grad().reset();
    torch::manual_seed(11);
    const at::Tensor out = regions ? checkpoint(network, x, true) : network(x, false);
    out.pow(2).sum().backward();
    Tensors all = {out.detach()};
    for (const at::Tensor& each : leaves) all.push_back(each.grad());
    return all;
  };
  const Tensors expected = gradients(false);
  EXPECT_EQ(runs, 2);
  const Tensors found = gradients(true);
  EXPECT_EQ(runs, 2 + 2 + 2 + 2) << "forward, the outer recomputation, the inner ones";
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(torch::allclose(found[i], expected[i], 1e-6, 1e-7)) << i;
}

TEST(ActivationCheckpoint, AutocastIsRestoredAndItsCacheIsNotUsed) {
  torch::nn::Linear layer(8, 8);
  const at::Tensor x = leaf({4, 8}, 0.2);
  Tensors leaves = {layer->weight, layer->bias, x};
  const auto gradients = [&](bool region) {
    for (const at::Tensor& each : leaves) each.mutable_grad().reset();
    const auto block = [layer = layer.ptr()](const at::Tensor& t) { return layer->forward(t).relu(); };
    at::Tensor first;
    at::Tensor second;
    {
      const test::AutocastScope autocast;
      first = region ? checkpoint(block, x) : block(x);
      second = layer->forward(first);  // would find the region's cast weight
    }
    EXPECT_EQ(first.scalar_type(), at::kBFloat16);
    second.to(at::kFloat).pow(2).sum().backward();
    EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
    EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
    Tensors all = {second.detach()};
    for (const at::Tensor& each : leaves) all.push_back(each.grad());
    return all;
  };
  const Tensors expected = gradients(false);
  const Tensors found = gradients(true);
  for (size_t i = 0; i < found.size(); ++i) {
    // A cached weight sums its gradients in bfloat16, two casts sum them in float32.
    EXPECT_TRUE(torch::allclose(found[i], expected[i], 1e-2, 1e-2)) << i;
  }
  EXPECT_TRUE(torch::equal(found[0], expected[0]));
}

TEST(ActivationCheckpoint, ComplexAndDoubleInputs) {
  const at::Tensor x = waves({6}, 0.2).to(torch::kComplexDouble).requires_grad_(true);
  expect_same_gradients(
      [&](const Around& around) {
        return torch::abs(around([](const Tensors& in) { return Tensors{in[0] * in[0]}; }, {x})[0]).sum();
      },
      {x});
}

TEST(ActivationCheckpoint, StatisticsCountRegionsAndRecomputations) {
  take_checkpoint_statistics();
  const CheckpointOptions options{.profile = true};
  const at::Tensor x = leaf({6, 4}, 0.2);
  const auto exp = [](const at::Tensor& t) { return t.exp(); };
  const at::Tensor out = checkpoint_with(options, exp, checkpoint_with(options, exp, x)).sum();
  out.backward();
  const CheckpointStatistics statistics = take_checkpoint_statistics();
  EXPECT_EQ(statistics.regions, 2);
  EXPECT_EQ(statistics.recomputations, 2);
  EXPECT_EQ(statistics.bytes_kept, 2 * 24 * 4);
  EXPECT_GT(statistics.forward_seconds, 0);
  EXPECT_GT(statistics.recomputation_seconds, 0);
  EXPECT_EQ(take_checkpoint_statistics().regions, 0);
}

}  // namespace
}  // namespace ds::recompute
