#include "optim/lamb.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <utility>

#include "core/check.h"
#include "optim/bucket_parameters.h"
#include "optim/slice_update.h"

namespace ds::optim {
namespace {

at::Tensor sum_of_squares(const at::Tensor& values) {
  return at::linalg_vector_norm(values, 2, at::OptionalIntArrayRef(), /*keepdim=*/false, at::kDouble).square_();
}

at::Tensor part(const at::Tensor& flat, const Segment& segment) {
  return flat.narrow(0, segment.slice_offset, segment.length);
}

}  // namespace

Lamb::Lamb(std::vector<GroupOptions> groups, LambRule rule) : ShardOptimizer(std::move(groups)), rule_(rule) {
  require<ConfigError>(rule.min_coeff > 0 && rule.min_coeff <= rule.max_coeff,
                       "optimizer.params.min_coeff: expected above 0 and at most max_coeff (", rule.max_coeff,
                       "), found ", rule.min_coeff);
}

void Lamb::allocate_states(int64_t index) {
  const Slice& own = slice(index);
  State state{.exp_avg = new_state(index), .exp_avg_sq = new_state(index), .position = {}};
  const std::vector<BucketParameter> whole = bucket_parameters(own, "Lamb");
  state.bucket_parameters = static_cast<int64_t>(whole.size());
  for (const Segment& segment : own.segments) {
    for (size_t i = 0; i < whole.size(); ++i) {
      if (whole[i].parameter == segment.parameter) state.position.push_back(static_cast<int64_t>(i));
    }
  }
  require(state.position.size() == own.segments.size(), "Lamb: expected the parameters of a slice among its bucket's");
  states_.push_back(std::move(state));
}

void Lamb::update(int64_t index, const at::Tensor& gradient, double gradient_scale) {
  const at::NoGradGuard no_grad;
  const Slice& slice = slice_for_update(index, gradient);
  const GroupOptions& group = step_group(slice);
  const State& state = states_[static_cast<size_t>(index)];
  const at::Tensor coefficient = coefficients(advance(slice, state, group, gradient, gradient_scale));
  double step_size = group.lr;
  if (rule_.bias_correction) {
    const double step = static_cast<double>(step_count_);
    step_size *= std::sqrt(1 - std::pow(group.beta2, step)) / (1 - std::pow(group.beta1, step));
  }
  for (size_t i = 0; i < slice.segments.size(); ++i) {
    const Segment& segment = slice.segments[i];
    const at::Tensor factor = coefficient.select(0, state.position[i]) * step_size;
    for_each_chunk(part(slice.master, segment), part(gradient, segment), KernelMemory::kTemporaries,
                   [&](int64_t begin, const at::Tensor& m, const at::Tensor& /*g*/) {
                     m.sub_(direction(state, group, segment.slice_offset + begin, m).mul_(factor));
                   });
  }
}

at::Tensor Lamb::advance(const Slice& slice, const State& state, const GroupOptions& group, const at::Tensor& gradient,
                         double gradient_scale) const {
  const at::Tensor squares =
      at::zeros({2, state.bucket_parameters}, slice.master.options().dtype(at::kDouble).requires_grad(false));
  for (size_t i = 0; i < slice.segments.size(); ++i) {
    const Segment& segment = slice.segments[i];
    for_each_chunk(part(slice.master, segment), part(gradient, segment), KernelMemory::kTemporaries,
                   [&](int64_t begin, const at::Tensor& m, const at::Tensor& g) {
                     if (gradient_scale != 1.0) g.mul_(gradient_scale);
                     const int64_t offset = segment.slice_offset + begin;
                     state.exp_avg.narrow(0, offset, m.numel()).mul_(group.beta1).add_(g, 1 - group.beta1);
                     state.exp_avg_sq.narrow(0, offset, m.numel()).mul_(group.beta2).addcmul_(g, g, 1 - group.beta2);
                     squares[0][state.position[i]].add_(sum_of_squares(m));
                     squares[1][state.position[i]].add_(sum_of_squares(direction(state, group, offset, m)));
                   });
  }
  if (slice.exchange->size() > 1) slice.exchange->sum(squares);
  return squares;
}

at::Tensor Lamb::coefficients(const at::Tensor& squares) const {
  const at::Tensor weight = squares[0].sqrt();
  const at::Tensor step = squares[1].sqrt();
  const at::Tensor ratio = (weight / step).clamp_(rule_.min_coeff, rule_.max_coeff);
  return at::where((weight != 0).logical_and_(step != 0), ratio, at::ones_like(ratio));
}

at::Tensor Lamb::direction(const State& state, const GroupOptions& group, int64_t begin,
                           const at::Tensor& master) const {
  const at::Tensor exp_avg = state.exp_avg.narrow(0, begin, master.numel());
  const at::Tensor exp_avg_sq = state.exp_avg_sq.narrow(0, begin, master.numel());
  at::Tensor divisor = rule_.eps_inside_sqrt ? exp_avg_sq.add(group.eps).sqrt_() : exp_avg_sq.sqrt().add_(group.eps);
  at::Tensor result = exp_avg.div(divisor);
  if (group.weight_decay != 0.0) result.add_(master, group.weight_decay);
  return result;
}

NamedStates Lamb::states(int64_t index) {
  const State& state = states_.at(static_cast<size_t>(index));
  return {{"exp_avg", state.exp_avg}, {"exp_avg_sq", state.exp_avg_sq}};
}

}  // namespace ds::optim
