#include "dsengine/optimizer.h"

#include <torch/optim/optimizer.h>

#include <utility>

#include "core/check.h"
#include "optim/plateau.h"

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

LrScheduler::~LrScheduler() = default;

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

void LrScheduler::step(double value) {
  require(plateau_ != nullptr, "lr_scheduler()->step(value): expected the scheduler ReduceLROnPlateau, found another ",
          "one, which the engine moves with its steps; remove the call, or set scheduler.type");
  const double mean = mean_of_ranks_(value);
  change([&](std::vector<optimizers::GroupOptions>& groups) { plateau_->observe(mean, groups); });
}

void LrScheduler::follow(const optimizers::ReduceLrOnPlateauOptions& options,
                         std::function<double(double)> mean_of_ranks) {
  plateau_ = std::make_unique<optimizers::Plateau>(options, get_last_lr().size());
  mean_of_ranks_ = std::move(mean_of_ranks);
}

std::optional<optimizers::PlateauState> LrScheduler::plateau() const {
  return plateau_ ? std::optional(plateau_->state()) : std::nullopt;
}

void LrScheduler::load_plateau(const optimizers::PlateauState& state) {
  require(plateau_ != nullptr, "learning-rate scheduler: expected ReduceLROnPlateau, found another one");
  require(state.bad_values >= 0 && state.cooldown >= 0 && state.values >= 0,
          "learning-rate scheduler: expected counts of values from 0 on, found a negative one");
  plateau_->load(state);
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
  change([this](std::vector<optimizers::GroupOptions>& groups) { rule_(last_batch_iteration_, groups); });
}

void LrScheduler::change(const std::function<void(std::vector<optimizers::GroupOptions>&)>& write) {
  if (optimizer_) return write(optimizer_->groups());
  std::vector<optimizers::GroupOptions> groups;
  for (const double lr : learning_rates(*client_)) groups.push_back({.lr = lr});
  write(groups);
  for (size_t i = 0; i < groups.size(); ++i) client_->param_groups()[i].options().set_lr(groups[i].lr);
}

}  // namespace ds::engine
