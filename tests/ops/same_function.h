// Two functions of tensors compared: results, and gradients for a cotangent that is not constant.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <functional>
#include <string>
#include <vector>

#include "tests/ops/numerical_gradient.h"

namespace ds::ops {

using Tensors = std::vector<at::Tensor>;
using TensorFunction = std::function<Tensors(const Tensors&)>;

// Values of a formula, in [-2, 2], in another order for another phase.
inline at::Tensor wave(at::IntArrayRef sizes, double phase, at::ScalarType type = at::kFloat) {
  const int64_t count = c10::multiply_integers(sizes);
  return (at::sin(at::arange(count, at::kDouble) * 1.7 + phase) * 2.0).view(sizes).to(type);
}

struct Evaluated {
  Tensors results, gradients;
};

inline Evaluated evaluate(const TensorFunction& function, const Tensors& inputs) {
  Tensors leaves;
  for (const at::Tensor& input : inputs) leaves.push_back(input.detach().requires_grad_(true));
  Evaluated evaluated;
  evaluated.results = function(leaves);
  Tensors cotangents;
  for (const at::Tensor& result : evaluated.results) {
    const at::Tensor rounded = wave(result.sizes(), 0.4 + static_cast<double>(cotangents.size()), at::kBFloat16);
    cotangents.push_back(rounded.to(result.scalar_type()));  // the same in every dtype
  }
  evaluated.gradients = torch::autograd::grad(evaluated.results, leaves, cotangents);
  return evaluated;
}

// Largest differences relative to the largest element, of each result and gradient.
inline void expect_same(const Evaluated& found, const Evaluated& expected, double tolerance, const std::string& what) {
  ASSERT_EQ(found.results.size(), expected.results.size()) << what;
  for (size_t i = 0; i < found.results.size(); ++i) {
    EXPECT_LE(relative_difference(found.results[i], expected.results[i]), tolerance) << what << ", result " << i;
  }
  for (size_t i = 0; i < found.gradients.size(); ++i) {
    EXPECT_LE(relative_difference(found.gradients[i], expected.gradients[i]), tolerance) << what << ", gradient " << i;
  }
}

inline void expect_same_function(const TensorFunction& function, const TensorFunction& reference, const Tensors& inputs,
                                 double tolerance, const std::string& what) {
  const Evaluated found = evaluate(function, inputs);
  for (const at::Tensor& result : found.results) EXPECT_EQ(result.scalar_type(), inputs[0].scalar_type()) << what;
  for (size_t i = 0; i < inputs.size(); ++i) {
    EXPECT_EQ(found.gradients[i].scalar_type(), inputs[i].scalar_type()) << what;
  }
  expect_same(found, evaluate(reference, inputs), tolerance, what);
}

// In 16 bits: as near to the reference in float64, on the same rounded inputs, as one rounding of results allows.
inline void expect_rounded(const TensorFunction& function, const TensorFunction& reference, const Tensors& inputs,
                           double step, const std::string& what) {
  Tensors exact;
  for (const at::Tensor& input : inputs) exact.push_back(input.to(at::kDouble));
  expect_same(evaluate(function, inputs), evaluate(reference, exact), step, what);
}

// The sum of all results with weights of their own, for differences.
inline std::function<at::Tensor(const Tensors&)> weighted(const TensorFunction& function) {
  return [function](const Tensors& inputs) {
    at::Tensor total = at::zeros({}, at::kDouble);
    for (const at::Tensor& result : function(inputs))
      total = total + (result * wave(result.sizes(), 0.9, at::kDouble)).sum();
    return total;
  };
}

}  // namespace ds::ops
