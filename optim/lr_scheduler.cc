#include "dsengine/optimizer.h"

#include <torch/optim/optimizer.h>
#include <torch/optim/schedulers/lr_scheduler.h>

#include <cstdint>
#include <utility>

#include "core/check.h"
#include "optim/plateau.h"

namespace ds::engine {
namespace {

void set_rates(torch::optim::Optimizer& optimizer, const std::vector<double>& rates) {
  for (size_t i = 0; i < rates.size(); ++i) optimizer.param_groups()[i].options().set_lr(rates[i]);
}

// Reads and sets what torch's class keeps for its subclasses.
struct OpenScheduler : torch::optim::LRScheduler {
  static unsigned& steps_of(torch::optim::LRScheduler& scheduler) { return scheduler.*(&OpenScheduler::step_count_); }
  static std::vector<double> rates_of(const torch::optim::LRScheduler& scheduler) {
    return (scheduler.*(&OpenScheduler::get_current_lrs))();
  }
};

// A scheduler of torch's, which only goes on: to go back it begins anew.
class TorchSchedule {
 public:
  TorchSchedule(std::shared_ptr<torch::optim::LRScheduler> scheduler,
                std::shared_ptr<torch::optim::Optimizer> optimizer)
      : scheduler_(std::move(scheduler)), optimizer_(std::move(optimizer)) {
    require(scheduler_ != nullptr && optimizer_ != nullptr,
            "learning-rate scheduler: expected a scheduler of torch's and its optimizer, found none");
    first_ = rates_ = learning_rates(*optimizer_);
    require(is_of_optimizer(), ".torch_scheduler: expected one that was made over .optimizer, whose rates it sets; ",
            "found that it has another optimizer");
    require(OpenScheduler::steps_of(*scheduler_) == 0, ".torch_scheduler: expected one that has not stepped, because ",
            "the engine alone steps it, found ", OpenScheduler::steps_of(*scheduler_), " calls of its step()");
  }

  // Returns the rates after so many calls of the scheduler's step().
  const std::vector<double>& after(int64_t calls) {
    unsigned& made = OpenScheduler::steps_of(*scheduler_);
    require(made == calls_, ".torch_scheduler: the engine calls its step() after each applied step, and the program ",
            "has called it, too: expected ", calls_, " calls so far, found ", made, "; remove the program's");
    if (calls < calls_) {
      calls_ = made = 0;
      rates_ = first_;
    }
    set_rates(*optimizer_, rates_);  // which each step() may go on from
    for (; calls_ < calls; ++calls_) scheduler_->step();
    rates_ = learning_rates(*optimizer_);
    return rates_;
  }

 private:
  // The scheduler does not tell: it is of this optimizer if it reads what is written there.
  bool is_of_optimizer() const {
    std::vector<double> other = first_;
    for (double& rate : other) rate += 1.0;
    set_rates(*optimizer_, other);
    const bool same = OpenScheduler::rates_of(*scheduler_) == other;
    set_rates(*optimizer_, first_);
    return same;
  }

  std::shared_ptr<torch::optim::LRScheduler> scheduler_;
  std::shared_ptr<torch::optim::Optimizer> optimizer_;
  std::vector<double> first_;  // before its first step
  std::vector<double> rates_;  // after the last one
  unsigned calls_ = 0;         // of its step()
};

}  // namespace

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

LrScheduler::Rule LrScheduler::of(std::shared_ptr<torch::optim::LRScheduler> scheduler,
                                  std::shared_ptr<torch::optim::Optimizer> optimizer) {
  const auto schedule = std::make_shared<TorchSchedule>(std::move(scheduler), std::move(optimizer));
  return [schedule](int64_t t, std::vector<optimizers::GroupOptions>& groups) {
    const std::vector<double>& rates = schedule->after(t + 2);  // the first call is that of Python's constructors
    for (size_t i = 0; i < groups.size(); ++i) groups[i].lr = rates[i];
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
  std::vector<double> rates;
  for (const optimizers::GroupOptions& group : groups) rates.push_back(group.lr);
  set_rates(*client_, rates);
}

}  // namespace ds::engine
