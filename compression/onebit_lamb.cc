#include "compression/onebit_lamb.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "compression/bucket_exchange.h"
#include "core/check.h"
#include "optim/chunked_update.h"

namespace ds::compression {

using optimizers::segment_part;
using optimizers::sum_of_squares;

OneBitLamb::OneBitLamb(std::vector<optimizers::GroupOptions> groups, OneBitLambRule rule,
                       comm::Communicator& communicator)
    : CompressedOptimizer(std::move(groups), communicator), rule_(rule) {
  if (rule.deepspeed_semantics) rule_.lamb.bias_correction = false;
  optimizers::require_lamb_rule(rule_.lamb);
  require_freeze_step(rule.freeze_step, rule.deepspeed_semantics);
  require<ConfigError>(rule.factor_min > 0 && rule.factor_min <= rule.factor_max,
                       "optimizer.params.factor_min: expected above 0 and at most factor_max (", rule.factor_max,
                       "), found ", rule.factor_min);
}

void OneBitLamb::allocate_slice_states(int64_t index, const optimizers::NewState& new_state) {
  const optimizers::Slice& own = slice(index);
  const at::Tensor exp_avg = new_state();
  const at::Tensor exp_avg_sq = new_state();
  State state{.lamb = optimizers::make_lamb_state(own, exp_avg, exp_avg_sq, "OneBitLamb"),
              .fresh_variance = new_state(),
              .parameters = {}};
  const at::Tensor parameters = at::empty({static_cast<int64_t>(state.lamb.parameters.size())}, at::kLong);
  std::copy(state.lamb.parameters.begin(), state.lamb.parameters.end(), parameters.mutable_data_ptr<int64_t>());
  state.parameters = parameters.to(own.master.device());
  states_.push_back(std::move(state));
  if (coefficient_.defined() || !own.parameters) return;
  const auto options = own.master.options().dtype(at::kDouble).requires_grad(false);
  coefficient_ = at::zeros({static_cast<int64_t>(own.parameters->size())}, options);
  factor_ = at::ones({static_cast<int64_t>(own.parameters->size())}, options);
  for (const ParameterInfo& parameter : *own.parameters) names_.push_back(parameter.name);
}

void OneBitLamb::advance(int64_t index, const at::Tensor& gradient, double gradient_scale, const at::Tensor& copy) {
  if (is_local(step_count_)) {
    advance_frozen(index, gradient, gradient_scale);
  } else if (step_count_ > 1 || !rule_.deepspeed_semantics) {
    advance_dense(index, gradient, gradient_scale);
  }
  if (copy.defined()) at::Tensor(copy).copy_(slice(index).master);
}

void OneBitLamb::advance_dense(int64_t index, const at::Tensor& gradient, double gradient_scale) {
  const optimizers::Slice& own = slice(index);
  const optimizers::GroupOptions& group = step_group(own);
  const State& state = states_[static_cast<size_t>(index)];
  const at::Tensor squares = optimizers::advance_lamb(own, state.lamb, rule_.lamb, group, gradient, gradient_scale);
  const at::Tensor coefficients = optimizers::lamb_coefficients(rule_.lamb, squares);
  const at::Tensor average = coefficient_.index_select(0, state.parameters);
  const at::Tensor moved = average * rule_.coeff_beta + coefficients * (1 - rule_.coeff_beta);
  coefficient_.index_copy_(0, state.parameters, at::where(coefficients != 1, moved, average));
  optimizers::apply_lamb(own, state.lamb, rule_.lamb, group, coefficients,
                         optimizers::lamb_step_size(rule_.lamb, group, step_count_, step_count_));
  if (step_count_ == rule_.freeze_step) at::Tensor(state.fresh_variance).copy_(state.lamb.exp_avg_sq);
}

void OneBitLamb::advance_frozen(int64_t index, const at::Tensor& gradient, double gradient_scale) {
  const optimizers::Slice& own = slice(index);
  const optimizers::GroupOptions& group = step_group(own);
  const State& state = states_[static_cast<size_t>(index)];
  if (!rule_.deepspeed_semantics) exchange(index).hold_without_variance(state.lamb.exp_avg_sq);
  const at::Tensor previous = state.lamb.exp_avg.clone();
  exchange(index).exchange_average(state.lamb.exp_avg, gradient, gradient_scale, group.beta1);
  at::Tensor coefficients = coefficient_.index_select(0, state.parameters);
  if (!rule_.deepspeed_semantics) coefficients.masked_fill_(coefficients.eq(0), 1);
  coefficients.mul_(limited(state, factors(index, previous)));
  optimizers::apply_lamb(own, state.lamb, rule_.lamb, group, coefficients,
                         optimizers::lamb_step_size(rule_.lamb, group, step_count_, rule_.freeze_step));
}

at::Tensor OneBitLamb::factors(int64_t index, const at::Tensor& previous) {
  const optimizers::Slice& own = slice(index);
  const optimizers::GroupOptions& group = step_group(own);
  const State& state = states_[static_cast<size_t>(index)];
  const auto options = own.master.options().dtype(at::kDouble).requires_grad(false);
  at::Tensor largest = at::zeros({state.parameters.numel()}, options);
  const at::Tensor squares = at::zeros({2, state.parameters.numel()}, options);  // of u and of U
  for (size_t i = 0; i < own.segments.size(); ++i) {
    const Segment& segment = own.segments[i];
    const int64_t position = state.lamb.position[i];
    optimizers::for_each_chunk(
        segment_part(own.master, segment), segment_part(previous, segment), optimizers::KernelMemory::kTemporaries,
        [&](int64_t begin, const at::Tensor& w, const at::Tensor& m) {
          const int64_t offset = segment.slice_offset + begin;
          const at::Tensor average = state.lamb.exp_avg.narrow(0, offset, w.numel());
          const at::Tensor fresh = state.fresh_variance.narrow(0, offset, w.numel());
          const at::Tensor gradient = (average - m * group.beta1).div_(1 - group.beta1);
          at::Tensor(fresh).mul_(group.beta2).add_((gradient * gradient).mul_(1 - group.beta2));
          const at::Tensor divisor =
              optimizers::lamb_divisor(rule_.lamb, group, state.lamb.exp_avg_sq.narrow(0, offset, w.numel()));
          const at::Tensor most = (divisor / optimizers::lamb_divisor(rule_.lamb, group, fresh)).max().to(at::kDouble);
          largest.select(0, position).copy_(at::maximum(largest.select(0, position), most));
          if (group.weight_decay == 0.0) return;
          at::Tensor direction = average / divisor;
          squares[0][position].add_(sum_of_squares(direction));
          squares[1][position].add_(sum_of_squares(direction.add_(w * group.weight_decay)));
        });
  }
  if (own.exchange->size() > 1) {
    exchange(index).take_largest(largest, "LAMB factors");
    if (group.weight_decay != 0.0) own.exchange->sum(squares);
  }
  if (group.weight_decay == 0.0) return largest;
  // A parameter that is 0 and has no momentum: 0 / 0, and nothing moves.
  const at::Tensor ratio = at::where(squares[1] > 0, squares[0] / squares[1], at::ones_like(squares[1]));
  const at::Tensor share = at::clamp(ratio.sqrt(), std::nullopt, 1.0);
  return largest * share + (1 - share);
}

at::Tensor OneBitLamb::limited(const State& state, const at::Tensor& factors) {
  const at::Tensor last = factor_.index_select(0, state.parameters);
  at::Tensor result = factors.clamp(rule_.factor_min, rule_.factor_max);
  result = at::minimum(result, last * (1 + rule_.factor_threshold));
  result = at::maximum(result, last * (1 - rule_.factor_threshold));
  factor_.index_copy_(0, state.parameters, result);
  return result;
}

optimizers::NamedStates OneBitLamb::states(int64_t index) {
  const State& state = states_.at(static_cast<size_t>(index));
  return {{"exp_avg", state.lamb.exp_avg},
          {"exp_avg_sq", state.lamb.exp_avg_sq},
          {"exp_avg_sq_fresh", state.fresh_variance}};
}

optimizers::NamedStates OneBitLamb::shared_states() {
  optimizers::NamedStates states;
  for (size_t i = 0; i < names_.size(); ++i) {
    states.emplace_back(cat("lamb_coefficient/", names_[i]), coefficient_.narrow(0, static_cast<int64_t>(i), 1));
    states.emplace_back(cat("lamb_factor/", names_[i]), factor_.narrow(0, static_cast<int64_t>(i), 1));
  }
  return states;
}

}  // namespace ds::compression
