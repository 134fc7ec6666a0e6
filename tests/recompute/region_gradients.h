// Comparing what a function gives as a checkpointed region with what it gives by itself.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <utility>
#include <vector>

#include "dsengine/activation_checkpoint.h"

namespace ds::recompute {

using Tensors = std::vector<at::Tensor>;

inline at::Tensor waves(at::IntArrayRef sizes, double start) {
  return torch::sin(torch::arange(c10::multiply_integers(sizes), torch::kDouble) * 0.7 + start)
      .to(torch::kFloat)
      .view(sizes);
}

inline at::Tensor leaf(at::IntArrayRef sizes, double start) { return waves(sizes, start).requires_grad_(true); }

// Runs a function or runs it as a region.
using Around = std::function<Tensors(RegionFunction, const Tensors&)>;

inline Tensors plainly(const RegionFunction& function, const Tensors& inputs) { return function(inputs); }
inline Tensors as_region(RegionFunction function, const Tensors& inputs) {
  return checkpoint_tensors(checkpoint_options(), std::move(function), inputs);
}

inline void expect_equal(const Tensors& found, const Tensors& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i) {
    ASSERT_EQ(found[i].defined(), expected[i].defined()) << "tensor " << i;
    if (found[i].defined()) EXPECT_TRUE(torch::equal(found[i], expected[i])) << "tensor " << i;
  }
}

// `train` computes a loss with the given way of calling; the gradients of `leaves` and the loss must be the same.
inline void expect_same_gradients(const std::function<at::Tensor(const Around&)>& train, const Tensors& leaves) {
  const auto run = [&](const Around& around) {
    for (const at::Tensor& each : leaves) each.mutable_grad().reset();
    torch::manual_seed(7);
    Tensors result = {train(around)};
    result[0].backward();
    result[0] = result[0].detach();
    for (const at::Tensor& each : leaves) result.push_back(each.grad());
    result.push_back(torch::rand({3}));  // where the generator stands
    return result;
  };
  const Tensors expected = run(plainly);
  expect_equal(run(as_region), expected);
}

}  // namespace ds::recompute
