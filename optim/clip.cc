#include "optim/clip.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/nan_to_num.h>

#include <algorithm>

namespace ds::optimizers {
namespace {

// Keeps the quotient finite where all gradients are zero.
constexpr double kClipEpsilon = 1e-6;

}  // namespace

double clip_factor(double norm, std::initializer_list<double> max_norms) {
  double factor = 1.0;
  for (const double limit : max_norms) {
    if (limit > 0) factor *= std::min(1.0, limit / (norm * factor + kClipEpsilon));  // NaN: 1
  }
  return factor;
}

at::Tensor clip_factor(const at::Tensor& norm, std::initializer_list<double> max_norms) {
  at::Tensor factor;
  for (const double limit : max_norms) {
    if (limit <= 0) continue;
    const at::Tensor clipped = factor.defined() ? norm * factor : norm;
    const at::Tensor next = at::nan_to_num(((clipped + kClipEpsilon).reciprocal() * limit).clamp_max(1.0), 1.0);
    factor = factor.defined() ? factor * next : next;
  }
  return factor.defined() ? factor.to(at::kFloat) : factor;
}

void clip_to_norm(const std::vector<at::Tensor>& parameters, double norm, double max_norm) {
  const at::NoGradGuard no_grad;
  const double factor = max_norm / (norm + kClipEpsilon);
  if (factor >= 1.0) return;  // NaN goes on
  for (const at::Tensor& parameter : parameters) {
    if (parameter.grad().defined()) parameter.mutable_grad().mul_(factor);
  }
}

}  // namespace ds::optimizers
