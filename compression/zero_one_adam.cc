#include "compression/zero_one_adam.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "compression/bucket_exchange.h"
#include "compression/frozen_variance.h"
#include "core/check.h"
#include "optim/chunked_update.h"

namespace ds::compression {

ZeroOneSchedule::ZeroOneSchedule(const ZeroOneRule& rule)
    : rule_(rule), first_frozen_(rule.var_freeze_step + (rule.deepspeed_semantics ? 2 : 1)) {
  const auto positive = [](const char* key, int64_t value, int64_t least) {
    require<ConfigError>(value >= least, "optimizer.params.", key, ": expected at least ", least, ", found ", value);
  };
  positive("var_freeze_step", rule.var_freeze_step, 1);
  positive("var_update_scaler", rule.var_update_scaler, 1);
  positive("local_step_scaler", rule.local_step_scaler, 1);
  positive("local_step_clipper", rule.local_step_clipper, 1);
}

ZeroOneStep ZeroOneSchedule::at(int64_t step) {
  ensure(step > 0, "steps begin at 1");
  if (step + 1 == step_) return before_;
  if (step < step_) *this = ZeroOneSchedule(rule_);
  while (step_ < step) advance();
  return now_;
}

void ZeroOneSchedule::advance() {
  before_ = now_;
  ++step_;
  now_.frozen = step_ >= first_frozen_;
  now_.first_frozen = step_ == first_frozen_;
  // DeepSpeed's first step makes its buffers only.
  const bool idle = rule_.deepspeed_semantics && step_ == 1;
  now_.updates_variance = !now_.frozen && !idle && step_ % variance_interval_ == 0;
  now_.meets = now_.frozen && step_ % local_interval_ == 0;
  if (now_.updates_variance) ++now_.variance_updates;
  if (!now_.frozen) {
    if (!idle && step_ % variance_interval_ == 0 && ++variance_counter_ == rule_.var_update_scaler) {
      variance_counter_ = 0;
      variance_interval_ *= 2;
    }
  } else if (++local_counter_ == rule_.local_step_scaler) {
    local_counter_ = 0;
    local_interval_ = std::min(rule_.local_step_clipper, local_interval_ * 2);
  }
}

using optimizers::KernelMemory;

ZeroOneAdam::ZeroOneAdam(std::vector<optimizers::GroupOptions> groups, ZeroOneRule rule,
                         comm::Communicator& communicator)
    : CompressedOptimizer(std::move(groups), communicator), rule_(rule), schedule_(rule) {}

void ZeroOneAdam::allocate_slice_states(int64_t index, const optimizers::NewState& new_state) {
  require(slice(index).exchange->size() == 1, "ZeroOneAdam: expected slices of whole buckets, found one of ",
          slice(index).exchange->size(), " parts; use zero_optimization.stage 0");
  State state;
  state.exp_avg = new_state();
  state.exp_avg_sq = new_state();
  state.stepped = new_state();
  states_.push_back(std::move(state));
  rates_ = at::zeros({slice_count()}, at::kDouble);
}

void ZeroOneAdam::advance(int64_t index, const at::Tensor& gradient, double gradient_scale, const at::Tensor& copy) {
  require(copy.defined() && !copy.is_alias_of(slice(index).master), "ZeroOneAdam: expected the model's weights in a ",
          "memory of their own beside the master's");
  const ZeroOneStep step = schedule_.at(step_count_);
  const bool idle = rule_.deepspeed_semantics && step_count_ == 1;
  if (step.frozen) {
    advance_alone(index, gradient, gradient_scale, step);
  } else if (!idle) {
    advance_together(index, gradient, gradient_scale, step);
  }
  at::Tensor(copy).copy_(weights(index));
}

void ZeroOneAdam::advance_together(int64_t index, const at::Tensor& gradient, double gradient_scale,
                                   const ZeroOneStep& step) {
  const optimizers::Slice& own = slice(index);
  const optimizers::GroupOptions& group = step_group(own);
  const State& state = states_[static_cast<size_t>(index)];
  at::Tensor mean = gradient.to(at::kFloat);
  if (gradient_scale != 1.0) mean.mul_(gradient_scale);
  if (step.updates_variance) {
    at::Tensor(state.exp_avg_sq).mul_(group.beta2).add_((mean * mean).mul_(1 - group.beta2));
    exchange(index).variance_changed();
  } else {
    if (!rule_.deepspeed_semantics) exchange(index).hold_without_variance(state.exp_avg_sq);
    exchange(index).exchange_values(mean, "gradients");
  }
  at::Tensor(state.exp_avg).mul_(group.beta1).add_(mean.mul_(1 - group.beta1));
  FrozenStep corrections;
  if (corrects_bias()) {
    corrections.average_correction = 1 - std::pow(group.beta1, step_count_);
    corrections.variance_correction = 1 - std::pow(group.beta2, step.variance_updates);
  }
  apply_frozen(own.master, state.exp_avg, state.exp_avg_sq, group, corrections);
}

void ZeroOneAdam::advance_alone(int64_t index, const at::Tensor& gradient, double gradient_scale,
                                const ZeroOneStep& step) {
  const optimizers::Slice& own = slice(index);
  const optimizers::GroupOptions& group = step_group(own);
  const State& state = states_[static_cast<size_t>(index)];
  if (step.first_frozen) exchange(index).forget_errors();
  if (!rule_.deepspeed_semantics) exchange(index).hold_without_variance(state.exp_avg_sq);
  const double rate = group.lr / (corrects_bias() ? 1 - std::pow(group.beta1, step_count_) : 1.0);
  const double correction = corrects_bias() ? 1 - std::pow(group.beta2, step.variance_updates) : 1.0;
  const at::Tensor held = exchange(index).moving();
  optimizers::for_each_chunk(state.exp_avg, gradient, KernelMemory::kTemporaries,
                             [&](int64_t begin, const at::Tensor& m, const at::Tensor& g) {
                               if (gradient_scale != 1.0) g.mul_(gradient_scale);
                               m.mul_(group.beta1).add_(g.mul_(1 - group.beta1));
                               const at::Tensor variance = state.exp_avg_sq.narrow(0, begin, m.numel());
                               at::Tensor direction = m / denominator(variance, correction, group.eps);
                               if (held.defined()) direction.mul_(held.narrow(0, begin, m.numel()));
                               state.stepped.narrow(0, begin, m.numel()).sub_(direction.mul_(rate));
                             });
  if (group.weight_decay != 0.0) at::Tensor(own.master).mul_(1 - group.lr * group.weight_decay);
  rates_.mutable_data_ptr<double>()[index] += rate;
  if (step.meets) meet(index, correction);
}

void ZeroOneAdam::meet(int64_t index, double variance_correction) {
  const optimizers::Slice& own = slice(index);
  const State& state = states_[static_cast<size_t>(index)];
  const double eps = step_group(own).eps;
  double& rates = rates_.mutable_data_ptr<double>()[index];
  const auto for_each = [&](const std::function<void(int64_t, const at::Tensor&, const at::Tensor&)>& kernel) {
    optimizers::for_each_chunk(state.stepped, state.exp_avg_sq, KernelMemory::kTemporaries, kernel);
  };
  for_each([&](int64_t /*begin*/, const at::Tensor& stepped, const at::Tensor& variance) {
    stepped.mul_(denominator(variance, variance_correction, eps));
  });
  exchange(index).exchange_values(state.stepped, "local steps");
  for_each([&](int64_t begin, const at::Tensor& stepped, const at::Tensor& variance) {
    const int64_t numel = stepped.numel();
    own.master.narrow(0, begin, numel).add_(stepped / denominator(variance, variance_correction, eps));
    // With no rate nothing was stepped, and nothing says what the average is.
    if (rates != 0) at::Tensor(state.exp_avg.narrow(0, begin, numel)).copy_(stepped.div(-rates));
    stepped.zero_();
  });
  rates = 0;
}

at::Tensor ZeroOneAdam::weights(int64_t index) {
  const State& state = states_.at(static_cast<size_t>(index));
  return schedule_.at(std::max<int64_t>(step_count_, 1)).frozen ? slice(index).master + state.stepped
                                                                : slice(index).master;
}

optimizers::NamedStates ZeroOneAdam::states(int64_t index) {
  const State& state = states_.at(static_cast<size_t>(index));
  return {{"exp_avg", state.exp_avg}, {"exp_avg_sq", state.exp_avg_sq}};
}

optimizers::NamedStates ZeroOneAdam::rank_states() {
  optimizers::NamedStates states = CompressedOptimizer::rank_states();
  for (size_t i = 0; i < states_.size(); ++i) {
    states.emplace_back(cat("own_exp_avg.", i), states_[i].exp_avg);
    states.emplace_back(cat("stepped.", i), states_[i].stepped);
  }
  return states;
}

void ZeroOneAdam::states_changed(bool rank_states) {
  CompressedOptimizer::states_changed(rank_states);
  if (rank_states) return;
  for (const State& state : states_) at::Tensor(state.stepped).zero_();
  rates_.zero_();
}

optimizers::NamedStates ZeroOneAdam::shared_states() { return {{"rates", rates_}}; }

}  // namespace ds::compression
