#include "layers/compressed/layer_quantization.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <limits>
#include <utility>

#include "core/check.h"
#include "core/random_streams.h"
#include "layers/compressed/quantizers.h"

namespace ds::model_compression {
namespace {

constexpr double kRangeMomentum = 0.95;  // DeepSpeed's act_range_momentum

// Whether the range is known, in a tensor: before the first training step both ends are the same.
at::Tensor is_known(const at::Tensor& range) { return range.select(0, 0) != range.select(0, 1); }

}  // namespace

WeightQuantization::WeightQuantization(const Rule& rule, std::string name, bool by_row)
    : rule_(rule), name_(std::move(name)), by_row_(by_row) {}

at::Tensor WeightQuantization::apply(const at::Tensor& weight, const Progress& progress) const {
  const int64_t step = progress.step - rule_.schedule_offset;
  Levels levels{.bits = bits_at(rule_.bits, step), .symmetric = rule_.symmetric, .groups = groups_of(weight)};
  // Ternary and binary weights are never rounded by chance, also not on the way from more bits.
  if (rule_.stochastic && levels.bits >= 3) {
    const std::string purpose = cat(name_, " weight rounding");
    const RandomStream stream{.seed = progress.seed, .step = progress.step, .purpose = purpose};
    const at::Tensor draws = at::rand(weight.sizes(), generator_of(stream), at::TensorOptions().dtype(at::kFloat));
    levels.noise = (draws - 0.5).to(weight.device());
  }
  at::Tensor values = quantized(weight, levels);
  const double share = float_share_at(rule_.bits, step);
  if (share != 0) {
    const at::NoGradGuard no_grad;
    values = weight.detach() * share + values * (1 - share);
  }
  return straight_through(weight, values);
}

at::Tensor WeightQuantization::final_values(const at::Tensor& weight) const {
  return quantized(weight,
                   {.bits = rule_.bits.target, .symmetric = rule_.symmetric, .groups = groups_of(weight), .noise = {}});
}

InputQuantization::InputQuantization(const Rule& rule, torch::nn::Module& keeper, at::Device device) : rule_(rule) {
  if (!rule.static_range) return;
  range_ = keeper.register_buffer("activation_range", at::zeros({2, 2}, at::dtype(at::kFloat).device(device)));
}

at::Tensor InputQuantization::range() const { return range_.to(at::kFloat).sum(0); }

void InputQuantization::set_range(const at::Tensor& range) {
  range_.select(0, 0).copy_(range);
  range_.select(0, 1).copy_(range - range_.select(0, 0).to(at::kFloat));
}

at::Tensor InputQuantization::apply(const at::Tensor& input) const {
  if (!rule_.static_range) {
    const int64_t groups = input.numel() == 0 ? 1 : input.numel() / input.size(-1);
    return straight_through(
        input,
        quantized(input, {.bits = rule_.bits.start, .symmetric = rule_.symmetric, .groups = groups, .noise = {}}));
  }
  at::Tensor values;
  {
    const at::NoGradGuard no_grad;
    const at::Tensor range = this->range();
    values =
        at::where(is_known(range), quantized_in_range(input, range, rule_.bits.start, rule_.symmetric), input.detach());
  }
  return straight_through(input, values);
}

void InputQuantization::observe(const at::Tensor& input) {
  if (input.numel() == 0) return;
  const at::NoGradGuard no_grad;
  const at::Tensor values = input.detach().to(at::kFloat);
  const at::Tensor seen = at::stack({-values.min(), values.max()});
  observed_ = observed_.defined() ? at::maximum(observed_, seen) : seen;
}

at::Tensor InputQuantization::take_observed() {
  at::Tensor result = std::exchange(observed_, at::Tensor());
  if (result.defined()) return result;
  return at::full({2}, -std::numeric_limits<float>::infinity(), at::dtype(at::kFloat).device(range_.device()));
}

void InputQuantization::follow(const at::Tensor& observed) {
  const at::NoGradGuard no_grad;
  const at::Tensor range = this->range();
  const at::Tensor seen = at::stack({-observed.select(0, 0), observed.select(0, 1)});
  const at::Tensor moved = range * kRangeMomentum + seen * (1 - kRangeMomentum);
  set_range(at::where(seen.isfinite(), at::where(is_known(range), moved, seen), range));
}

}  // namespace ds::model_compression
