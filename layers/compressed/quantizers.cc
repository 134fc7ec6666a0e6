#include "layers/compressed/quantizers.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/amin.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/round.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>

#include "core/check.h"

namespace ds::model_compression {
namespace {

struct StraightThrough : torch::autograd::Function<StraightThrough> {
  static at::Tensor forward(torch::autograd::AutogradContext* /*context*/, const at::Tensor& /*source*/,
                            const at::Tensor& values) {
    return values.view_as(values);
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* /*context*/,
                                               torch::autograd::tensor_list gradients) {
    return {gradients[0], at::Tensor()};
  }
};

at::Tensor computed(const at::Tensor& values) {
  const bool is_short = values.scalar_type() == at::kHalf || values.scalar_type() == at::kBFloat16;
  return is_short ? values.to(at::kFloat) : values;
}

// x / scale, without a division by the scale of a group that has none.
at::Tensor over(const at::Tensor& x, const at::Tensor& scale) { return x / at::where(scale == 0, 1.0, scale); }

at::Tensor rounded(const at::Tensor& x, const at::Tensor& noise) {
  return noise.defined() ? (x + noise).round() : x.round();
}

at::Tensor symmetric(const at::Tensor& x, const at::Tensor& largest, int64_t bits, const at::Tensor& noise) {
  const double half = std::exp2(static_cast<double>(bits - 1));
  const at::Tensor scale = largest * (1.0 / half);
  return rounded(over(x, scale), noise).clamp(-half, half - 1) * scale;
}

at::Tensor asymmetric(const at::Tensor& x, const at::Tensor& least, const at::Tensor& largest, int64_t bits,
                      const at::Tensor& noise) {
  const double count = std::exp2(static_cast<double>(bits));
  const at::Tensor scale = (largest - least) * (1.0 / count);
  const at::Tensor zero = over(least, scale).round() * scale;
  const at::Tensor levels = rounded(over(x - zero, scale), noise).clamp(0, count - 1);
  return at::where(scale == 0, x, levels * scale + zero);
}

at::Tensor ternary(const at::Tensor& x) {
  const at::Tensor size = x.abs();
  const at::Tensor threshold = size.mean(1, /*keepdim=*/true) * 0.7;
  const at::Tensor above = size > threshold;
  const at::Tensor count = above.sum(1, /*keepdim=*/true).clamp_min(1);
  const at::Tensor alpha = (size * above).sum(1, /*keepdim=*/true) / count;
  return x.sign() * above * alpha;
}

at::Tensor binary(const at::Tensor& x) { return x.sign() * x.abs().mean(1, /*keepdim=*/true); }

}  // namespace

at::Tensor quantized(const at::Tensor& values, const Levels& levels) {
  const at::NoGradGuard no_grad;
  require(levels.groups > 0 && values.numel() % levels.groups == 0, "quantisation: expected groups that divide ",
          values.numel(), " elements, found ", levels.groups);
  if (values.numel() == 0) return values.detach().clone();
  const at::Tensor x = computed(values.detach()).reshape({levels.groups, -1});
  const at::Tensor noise = levels.noise.defined() ? levels.noise.reshape(x.sizes()) : levels.noise;
  at::Tensor result;
  if (levels.bits == 1) {
    result = binary(x);
  } else if (levels.bits == 2) {
    result = ternary(x);
  } else if (levels.symmetric) {
    result = symmetric(x, x.abs().amax({1}, /*keepdim=*/true), levels.bits, noise);
  } else {
    result = asymmetric(x, x.amin({1}, true), x.amax({1}, true), levels.bits, noise);
  }
  return result.reshape(values.sizes()).to(values.scalar_type());
}

at::Tensor quantized_in_range(const at::Tensor& values, const at::Tensor& range, int64_t bits, bool is_symmetric) {
  const at::NoGradGuard no_grad;
  const at::Tensor x = computed(values.detach());
  const at::Tensor least = range.select(0, 0).to(x.scalar_type());
  const at::Tensor largest = range.select(0, 1).to(x.scalar_type());
  const at::Tensor result = is_symmetric ? symmetric(x, at::maximum(least.abs(), largest), bits, {})
                                         : asymmetric(x, least, largest, bits, {});
  return result.to(values.scalar_type());
}

at::Tensor largest_mask(const at::Tensor& scores, double ratio) {
  const at::NoGradGuard no_grad;
  const auto kept = static_cast<int64_t>(std::ceil(ratio * static_cast<double>(scores.numel())));
  const auto order = std::get<1>(scores.detach().reshape({-1}).sort(/*stable=*/true, /*dim=*/0, /*descending=*/true));
  at::Tensor mask = at::zeros({scores.numel()}, scores.options().dtype(at::kBool).requires_grad(false));
  mask.index_fill_(0, order.narrow(0, 0, kept), true);
  return mask.view(scores.sizes());
}

at::Tensor straight_through(const at::Tensor& source, const at::Tensor& values) {
  if (!at::GradMode::is_enabled() || !source.requires_grad()) return values;
  return StraightThrough::apply(source, values);
}

}  // namespace ds::model_compression
