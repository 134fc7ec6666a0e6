// Gradients of a function by differences, in float64.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <functional>
#include <vector>

namespace ds::ops {

// Expects that autograd's gradients of `function`, a float64 scalar of the float64 tensors `inputs`, are those of
// central differences in every element.
inline void expect_numerical_gradients(const std::function<at::Tensor(const std::vector<at::Tensor>&)>& function,
                                       const std::vector<at::Tensor>& inputs, double tolerance = 1e-7) {
  constexpr double kStep = 1e-5;
  std::vector<at::Tensor> leaves;
  for (const at::Tensor& input : inputs) leaves.push_back(input.detach().requires_grad_(true));
  const std::vector<at::Tensor> gradients = torch::autograd::grad({function(leaves)}, leaves);
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < inputs.size(); ++i) {
    at::Tensor differences = at::empty_like(inputs[i], at::MemoryFormat::Contiguous);
    std::vector<at::Tensor> moved(inputs.begin(), inputs.end());
    for (int64_t element = 0; element < inputs[i].numel(); ++element) {
      const auto value_at = [&](double by) {
        at::Tensor other = inputs[i].detach().clone(at::MemoryFormat::Contiguous);
        other.view({-1})[element] += by;
        moved[i] = other;
        return function(moved).item<double>();
      };
      differences.view({-1})[element] = (value_at(kStep) - value_at(-kStep)) / (2 * kStep);
    }
    const double off = inputs[i].numel() == 0 ? 0.0 : (differences - gradients[i]).abs().max().item<double>();
    EXPECT_LE(off, tolerance) << "input " << i << " of " << inputs[i].sizes();
  }
}

// |a - b| / max(|b|, 1e-30), of the largest elements: one number for a whole tensor.
inline double relative_difference(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes()) return 1e9;
  if (a.numel() == 0) return 0.0;
  const at::Tensor wide_a = a.detach().to(at::kDouble);
  const at::Tensor wide_b = b.detach().to(at::kDouble);
  return (wide_a - wide_b).abs().max().item<double>() / std::max(wide_b.abs().max().item<double>(), 1e-30);
}

}  // namespace ds::ops
