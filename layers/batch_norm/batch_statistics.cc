#include "layers/batch_norm/batch_statistics.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/batch_norm_update_stats.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/native_batch_norm_backward.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/zeros.h>

#include <tuple>
#include <vector>

namespace ds::norm {
namespace {

bool has_16_bits(at::ScalarType type) { return type == at::kHalf || type == at::kBFloat16; }

at::ScalarType statistics_type(const at::Tensor& input) {
  return has_16_bits(input.scalar_type()) ? at::kFloat : input.scalar_type();
}

at::Tensor as_type(const at::Tensor& tensor, at::ScalarType type) {
  return tensor.defined() ? tensor.detach().to(type) : tensor;
}

// [C] against [N, C, ...].
at::Tensor over(const at::Tensor& row, const at::Tensor& input) {
  std::vector<int64_t> sizes(static_cast<size_t>(input.dim()), 1);
  sizes[1] = row.size(0);
  return row.view(sizes);
}

}  // namespace

at::Tensor local_statistics(const at::Tensor& input) {
  const int64_t channels = input.size(1);
  const at::TensorOptions exact = input.options().dtype(at::kDouble);
  if (input.numel() == 0) return at::zeros({2 * channels + 1}, exact);
  const at::TensorOptions type = input.options().dtype(statistics_type(input));
  // Beside running statistics of float32 LibTorch takes inputs of 16 bits, and computes in float32. These are dropped.
  const at::Tensor running = at::zeros({channels}, type);
  const auto [mean, variance] = at::batch_norm_update_stats(input, running, running.clone(), /*momentum=*/0.0);
  const int64_t elements = input.numel() / channels;  // of a channel
  const at::Tensor count = at::full({1}, static_cast<double>(elements), exact);
  return at::cat({mean.to(at::kDouble), variance.to(at::kDouble), count});
}

BatchStatistics join_statistics(const at::Tensor& parts, const at::Tensor& input, double eps) {
  const int64_t channels = (parts.size(1) - 1) / 2;
  const at::Tensor means = parts.narrow(1, 0, channels);
  const at::Tensor variances = parts.narrow(1, channels, channels);
  const at::Tensor counts = parts.narrow(1, 2 * channels, 1);
  BatchStatistics result;
  result.count = counts.sum(0);
  result.exact_mean = (means * counts).sum(0) / result.count;
  const at::Tensor away = means - result.exact_mean;
  const at::Tensor squares = ((variances + away * away) * counts).sum(0);
  const at::Tensor variance = squares / result.count;
  result.unbiased = squares / (result.count - 1);
  const at::ScalarType type = statistics_type(input);
  result.mean = result.exact_mean.to(type);
  result.variance = variance.to(type);
  result.inverse = at::rsqrt(variance + eps).to(type);
  return result;
}

void update_running(const at::Tensor& running, const at::Tensor& value, double momentum) {
  running.copy_(running.to(at::kDouble) * (1 - momentum) + value * momentum);
}

at::Tensor normalize(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                     const BatchStatistics& statistics, double eps) {
  if (input.numel() == 0) return at::empty_like(input);
  const at::ScalarType type = statistics_type(input);
  // With statistics that are given this is one pass over the input on any device.
  return std::get<0>(at::native_batch_norm(input, as_type(weight, type), as_type(bias, type), statistics.mean,
                                           statistics.variance, /*training=*/false, /*momentum=*/0.0, eps));
}

at::Tensor local_gradient_sums(const at::Tensor& gradient, const at::Tensor& input, const BatchStatistics& statistics,
                               double eps) {
  const int64_t channels = input.size(1);
  if (input.numel() == 0) return at::zeros({2 * channels}, input.options().dtype(at::kDouble));
  // The gradients of a weight of ones and of a bias are these sums, in one pass.
  const at::Tensor ones = at::ones({channels}, statistics.mean.options());
  const auto [ignored, products, sums] =
      at::native_batch_norm_backward(gradient.to(input.scalar_type()), input, ones, {}, {}, statistics.mean,
                                     statistics.inverse, /*train=*/true, eps, {false, true, true});
  return at::cat({products.to(at::kDouble), sums.to(at::kDouble)});
}

at::Tensor input_gradient(const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight,
                          const BatchStatistics& statistics, const at::Tensor& sums) {
  if (input.numel() == 0) return at::empty_like(input);
  const int64_t channels = input.size(1);
  const at::ScalarType type = statistics_type(input);
  const at::Tensor inverse = statistics.inverse.to(at::kDouble);
  const at::Tensor scale = weight.defined() ? weight.detach().to(at::kDouble) * inverse : inverse;
  const at::Tensor products = sums.narrow(0, 0, channels) / statistics.count;
  const at::Tensor means = sums.narrow(0, channels, channels) / statistics.count;
  // scale * (gradient - means - (input - mean) * inverse * products), in place over one tensor of the input's size.
  at::Tensor result = input.to(type) - over(statistics.mean, input);
  result.mul_(over((scale * inverse * products).neg().to(type), input));
  result.addcmul_(gradient.to(type), over(scale.to(type), input));
  result.sub_(over((scale * means).to(type), input));
  return result.to(input.scalar_type());
}

}  // namespace ds::norm
