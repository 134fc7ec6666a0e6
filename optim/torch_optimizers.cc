#include "optim/torch_optimizers.h"

#include <ATen/ops/maximum.h>
#include <ATen/ops/ones.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/check.h"
#include "optim/chunked_update.h"

namespace ds::optimizers {

TorchOptimizer::TorchOptimizer(std::vector<GroupOptions> groups, TorchRule rule)
    : SliceOptimizer(std::move(groups)), rule_(rule) {
  const auto check = [](bool holds, const char* key, const char* expected, double found) {
    require<ConfigError>(holds, "optimizer.params.", key, ": expected ", expected, ", found ", found);
  };
  check(rule.alpha >= 0, "alpha", "at least 0", rule.alpha);
  check(rule.rho >= 0 && rule.rho <= 1, "rho", "0 to 1", rule.rho);
  check(rule.momentum_decay >= 0, "momentum_decay", "at least 0", rule.momentum_decay);
  has_momentum_ = std::any_of(groups_.begin(), groups_.end(), [](const GroupOptions& g) { return g.momentum > 0; });
  mu_product_ = at::ones({static_cast<int64_t>(groups_.size())}, at::kDouble);
  mu_before_ = mu_product_.clone();
}

std::vector<std::string> TorchOptimizer::state_names() const {
  switch (rule_.algorithm) {
    case TorchAlgorithm::kAdamax:
      return {"exp_avg", "exp_inf"};
    case TorchAlgorithm::kNadam:
    case TorchAlgorithm::kRadam:
      return {"exp_avg", "exp_avg_sq"};
    case TorchAlgorithm::kAdadelta:
      return {"square_avg", "acc_delta"};
    case TorchAlgorithm::kRmsprop:
      break;
  }
  std::vector<std::string> names = {"square_avg"};
  if (has_momentum_) names.emplace_back("momentum_buffer");
  if (rule_.centered) names.emplace_back("grad_avg");
  return names;
}

void TorchOptimizer::allocate_states(int64_t /*index*/, const NewState& new_state) {
  NamedStates& own = states_.emplace_back();
  for (std::string& name : state_names()) own.emplace_back(std::move(name), new_state());
}

std::string TorchOptimizer::name() const {
  switch (rule_.algorithm) {
    case TorchAlgorithm::kAdamax:
      return "Adamax";
    case TorchAlgorithm::kNadam:
      return "NAdam";
    case TorchAlgorithm::kRadam:
      return "RAdam";
    case TorchAlgorithm::kAdadelta:
      return "Adadelta";
    default:
      return "RMSprop";
  }
}

OptimizerTraits TorchOptimizer::traits() const {
  constexpr int64_t kFloat = 4;
  return {.state_bytes_per_element = kFloat * static_cast<int64_t>(state_names().size()),
          .uses_betas = rule_.algorithm != TorchAlgorithm::kRmsprop && rule_.algorithm != TorchAlgorithm::kAdadelta};
}

NamedStates TorchOptimizer::shared_states() {
  if (rule_.algorithm != TorchAlgorithm::kNadam) return {};
  if (mu_step_ > step_count_) {  // the last step was taken back
    mu_product_.copy_(mu_before_);
    mu_step_ = step_count_;
  }
  return {{"mu_product", mu_product_}};
}

void TorchOptimizer::states_changed(bool /*rank_states*/) {
  mu_step_ = step_count_;
  mu_before_.copy_(mu_product_);
}

double TorchOptimizer::momentum_of(const GroupOptions& group, int64_t step) const {
  return group.beta1 * (1.0 - 0.5 * std::pow(0.96, static_cast<double>(step) * rule_.momentum_decay));
}

// On every rank, also one without a slice that is trained: the product is that of the steps. A step that was taken back
// comes again under its number.
void TorchOptimizer::begin_step() {
  SliceOptimizer::begin_step();
  if (rule_.algorithm != TorchAlgorithm::kNadam) return;
  if (mu_step_ >= step_count_) {
    mu_product_.copy_(mu_before_);
  } else {
    mu_before_.copy_(mu_product_);
  }
  for (size_t g = 0; g < step_groups_.size(); ++g) {
    mu_product_.mutable_data_ptr<double>()[g] *= momentum_of(step_groups_[g], step_count_);
  }
  mu_step_ = step_count_;
}

// L2, or beside the gradient.
void TorchOptimizer::decay(const GroupOptions& group, const Elements& own) const {
  if (group.weight_decay == 0) return;
  if (rule_.decoupled_weight_decay) {
    own.weights.mul_(1 - group.lr * group.weight_decay);
  } else {
    own.gradient.add_(own.weights, group.weight_decay);
  }
}

void TorchOptimizer::rmsprop(const GroupOptions& group, const Elements& own) const {
  const at::Tensor& square_avg = own.states[0];
  square_avg.mul_(rule_.alpha).addcmul_(own.gradient, own.gradient, 1 - rule_.alpha);
  at::Tensor average = square_avg;
  if (rule_.centered) {
    const at::Tensor& grad_avg = own.states.back();
    grad_avg.lerp_(own.gradient, 1 - rule_.alpha);
    average = square_avg.addcmul(grad_avg, grad_avg, -1);
  }
  average = average.sqrt().add_(group.eps);
  if (group.momentum > 0) {
    const at::Tensor& buffer = own.states[1];
    buffer.mul_(group.momentum).addcdiv_(own.gradient, average);
    own.weights.add_(buffer, -group.lr);
  } else {
    own.weights.addcdiv_(own.gradient, average, -group.lr);
  }
}

void TorchOptimizer::adamax(const GroupOptions& group, const Elements& own) const {
  const at::Tensor& exp_avg = own.states[0];
  const at::Tensor& exp_inf = own.states[1];
  exp_avg.lerp_(own.gradient, 1 - group.beta1);
  exp_inf.copy_(at::maximum(exp_inf.mul_(group.beta2), own.gradient.abs().add_(group.eps)));
  const double correction = 1 - std::pow(group.beta1, static_cast<double>(step_count_));
  own.weights.addcdiv_(exp_avg, exp_inf, -group.lr / correction);
}

void TorchOptimizer::nadam(const GroupOptions& group, double mu_product, const Elements& own) const {
  const auto step = static_cast<double>(step_count_);
  const double mu = momentum_of(group, step_count_);
  const double mu_next = momentum_of(group, step_count_ + 1);
  const at::Tensor& exp_avg = own.states[0];
  const at::Tensor& exp_avg_sq = own.states[1];
  exp_avg.lerp_(own.gradient, 1 - group.beta1);
  exp_avg_sq.mul_(group.beta2).addcmul_(own.gradient, own.gradient, 1 - group.beta2);
  const at::Tensor denominator = exp_avg_sq.div(1 - std::pow(group.beta2, step)).sqrt_().add_(group.eps);
  own.weights.addcdiv_(own.gradient, denominator, -group.lr * (1.0 - mu) / (1.0 - mu_product));
  own.weights.addcdiv_(exp_avg, denominator, -group.lr * mu_next / (1.0 - mu_product * mu_next));
}

void TorchOptimizer::radam(const GroupOptions& group, const Elements& own) const {
  constexpr double kLongEnough = 5.0;  // Liu et al., arXiv:1908.03265, algorithm 2, as torch has it
  const auto step = static_cast<double>(step_count_);
  const double power2 = std::pow(group.beta2, step);
  const double correction1 = 1 - std::pow(group.beta1, step);
  const double correction2 = 1 - power2;
  const double longest = 2 / (1 - group.beta2) - 1;
  const double length = longest - 2 * step * power2 / correction2;
  const at::Tensor& exp_avg = own.states[0];
  const at::Tensor& exp_avg_sq = own.states[1];
  exp_avg.lerp_(own.gradient, 1 - group.beta1);
  exp_avg_sq.mul_(group.beta2).addcmul_(own.gradient, own.gradient, 1 - group.beta2);
  const at::Tensor direction = exp_avg.div(correction1).mul_(group.lr);
  if (length > kLongEnough) {
    const double rectified =
        std::sqrt((length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length));
    direction.mul_(exp_avg_sq.sqrt().add_(group.eps).reciprocal_().mul_(std::sqrt(correction2))).mul_(rectified);
  }
  own.weights.sub_(direction);
}

void TorchOptimizer::adadelta(const GroupOptions& group, const Elements& own) const {
  const at::Tensor& square_avg = own.states[0];
  const at::Tensor& acc_delta = own.states[1];
  square_avg.mul_(rule_.rho).addcmul_(own.gradient, own.gradient, 1 - rule_.rho);
  const at::Tensor deviation = square_avg.add(group.eps).sqrt_();
  const at::Tensor delta = acc_delta.add(group.eps).sqrt_().div_(deviation).mul_(own.gradient);
  acc_delta.mul_(rule_.rho).addcmul_(delta, delta, 1 - rule_.rho);
  own.weights.add_(delta, -group.lr);
}

void TorchOptimizer::update(int64_t index, const at::Tensor& gradient, double gradient_scale) {
  const Slice& slice = slice_for_update(index, gradient);
  const GroupOptions& group = step_group(slice);
  require(has_momentum_ || group.momentum == 0.0 || rule_.algorithm != TorchAlgorithm::kRmsprop, "RMSprop: group ",
          slice.group, " was made without momentum, found ", group.momentum,
          " (give the momentum when the optimizer is made)");
  const double mu_product = mu_product_.const_data_ptr<double>()[slice.group];
  const NamedStates& flat = states_[static_cast<size_t>(index)];
  std::vector<at::Tensor> all;
  for (const auto& [name, values] : flat) all.push_back(values);
  for_each_chunk(slice.master, all, gradient, KernelMemory::kTemporaries,
                 [&](const at::Tensor& m, const at::Tensor& g, const std::vector<at::Tensor>& states) {
                   if (gradient_scale != 1.0) g.mul_(gradient_scale);
                   const Elements own{m, g, states};
                   decay(group, own);
                   switch (rule_.algorithm) {
                     case TorchAlgorithm::kRmsprop:
                       return rmsprop(group, own);
                     case TorchAlgorithm::kAdamax:
                       return adamax(group, own);
                     case TorchAlgorithm::kNadam:
                       return nadam(group, mu_product, own);
                     case TorchAlgorithm::kRadam:
                       return radam(group, own);
                     case TorchAlgorithm::kAdadelta:
                       return adadelta(group, own);
                   }
                 });
}

}  // namespace ds::optimizers
