// The learning-rate schedule of a run: moves with the optimizer steps and writes into the optimizer's groups.
//
// The order is DeepSpeed's: with t = last_batch_iteration, which is -1 at construction and grows by one with each
// applied (not skipped) optimizer step, step number k = 0, 1, ... runs with the values of t = k - 1.
//
// Made by engine::initialize; it shares the optimizer with the engine. On the engine's thread. Throws UsageError.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "dsengine/lr_schedule.h"
#include "dsengine/optimizer.h"

namespace torch::optim {
class Optimizer;
}

namespace ds::optimizers {
class Plateau;
}

namespace ds::engine {

// The learning rate of each parameter group.
std::vector<double> learning_rates(const torch::optim::Optimizer& optimizer);
std::vector<double> learning_rates(const optimizers::ShardOptimizer& optimizer);

// Applies a rule to the groups of an optimizer, step by step. Not thread safe.
class LrScheduler {
 public:
  // Writes the values (lr, and betas or momentum where the schedule drives them) of iteration t >= -1 into the groups.
  using Rule = std::function<void(int64_t t, std::vector<optimizers::GroupOptions>& groups)>;

  // Applies the rule for t = -1 at once.
  LrScheduler(std::shared_ptr<optimizers::ShardOptimizer> optimizer, Rule rule);
  // A client optimizer: only lr is read and written.
  LrScheduler(std::shared_ptr<torch::optim::Optimizer> optimizer, Rule rule);
  ~LrScheduler();
  LrScheduler(const LrScheduler&) = delete;
  LrScheduler& operator=(const LrScheduler&) = delete;

  // From now on step(value) lowers the rates, beside the rule. `mean_of_ranks`: of one value from each rank.
  void follow(const optimizers::ReduceLrOnPlateauOptions& options, std::function<double(double)> mean_of_ranks);

  // A schedule of the config.
  static Rule of(std::shared_ptr<const optimizers::LrSchedule> schedule);
  // The rule "step number k runs with factor(k) times the group's lr", base_lr having one value per group.
  static Rule scaled_by(std::function<double(int64_t k)> factor, std::vector<double> base_lr);

  // Called by the engine after each applied optimizer step.
  void step();
  // Called by the program with what it has measured, as the loss of a validation: ReduceLROnPlateau's step(metrics) of
  // torch, at any time between steps. Collective: the mean of all ranks' values counts, so that their rates stay the
  // same. Throws UsageError for another schedule.
  void step(double value);
  // One value per parameter group: what the next optimizer step will run with.
  std::vector<double> get_last_lr() const;

  // The whole state, under DeepSpeed's name for it. Loading it writes the groups.
  int64_t last_batch_iteration() const { return last_batch_iteration_; }
  void load_last_batch_iteration(int64_t last_batch_iteration);
  // Of ReduceLROnPlateau; empty for another schedule.
  std::optional<optimizers::PlateauState> plateau() const;
  void load_plateau(const optimizers::PlateauState& state);

 private:
  void apply();
  void change(const std::function<void(std::vector<optimizers::GroupOptions>& groups)>& write);

  std::shared_ptr<optimizers::ShardOptimizer> optimizer_;  // one of the two is set
  std::shared_ptr<torch::optim::Optimizer> client_;
  Rule rule_;
  std::unique_ptr<optimizers::Plateau> plateau_;  // null: another schedule
  std::function<double(double)> mean_of_ranks_;
  int64_t last_batch_iteration_ = -1;
};

}  // namespace ds::engine
