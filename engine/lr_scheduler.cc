#include "dsengine/lr_scheduler.h"

#include <torch/optim/optimizer.h>

#include <utility>

#include "core/check.h"

namespace ds::engine {

std::vector<double> learning_rates(const torch::optim::Optimizer& optimizer) {
  std::vector<double> result;
  for (const auto& group : optimizer.param_groups()) result.push_back(group.options().get_lr());
  return result;
}

std::vector<double> learning_rates(const optimizers::ShardOptimizer& optimizer) {
  std::vector<double> result;
  for (const optimizers::GroupOptions& group : optimizer.groups()) result.push_back(group.lr);
  return result;
}

LrScheduler::LrScheduler(std::shared_ptr<optimizers::ShardOptimizer> optimizer, Rule rule)
    : optimizer_(std::move(optimizer)), rule_(std::move(rule)) {
  require(optimizer_ != nullptr && rule_ != nullptr,
          "learning-rate scheduler: expected an optimizer and a rule, found none");
  apply();
}

LrScheduler::LrScheduler(std::shared_ptr<torch::optim::Optimizer> optimizer, Rule rule)
    : client_(std::move(optimizer)), rule_(std::move(rule)) {
  require(client_ != nullptr && rule_ != nullptr,
          "learning-rate scheduler: expected an optimizer and a rule, found none");
  apply();
}

LrScheduler::Rule LrScheduler::of(std::shared_ptr<const optimizers::LrSchedule> schedule) {
  require(schedule != nullptr, "learning-rate scheduler: expected a schedule, found none");
  return [schedule = std::move(schedule)](int64_t t, std::vector<optimizers::GroupOptions>& groups) {
    schedule->apply(t, groups);
  };
}

LrScheduler::Rule LrScheduler::scaled_by(std::function<double(int64_t)> factor, std::vector<double> base_lr) {
  return [factor = std::move(factor), base_lr = std::move(base_lr)](int64_t t,
                                                                    std::vector<optimizers::GroupOptions>& groups) {
    require(groups.size() == base_lr.size(), "learning-rate scheduler: expected ", base_lr.size(),
            " parameter groups, found ", groups.size());
    const double value = factor(t + 1);
    for (size_t i = 0; i < groups.size(); ++i) groups[i].lr = base_lr[i] * value;
  };
}

void LrScheduler::step() {
  ++last_batch_iteration_;
  apply();
}

std::vector<double> LrScheduler::get_last_lr() const {
  return client_ ? learning_rates(*client_) : learning_rates(*optimizer_);
}

void LrScheduler::load_last_batch_iteration(int64_t last_batch_iteration) {
  require(last_batch_iteration >= -1, "learning-rate scheduler: expected last_batch_iteration >= -1, found ",
          last_batch_iteration);
  last_batch_iteration_ = last_batch_iteration;
  apply();
}

void LrScheduler::apply() {
  if (optimizer_) {
    rule_(last_batch_iteration_, optimizer_->groups());
    return;
  }
  std::vector<optimizers::GroupOptions> groups;
  for (const double lr : learning_rates(*client_)) groups.push_back({.lr = lr});
  rule_(last_batch_iteration_, groups);
  for (size_t i = 0; i < groups.size(); ++i) client_->param_groups()[i].options().set_lr(groups[i].lr);
}

}  // namespace ds::engine
