// The optimizer and the learning-rate scheduler of a run, as engine::initialize() returns them.
//
// Both update the weights by themselves, with the engine's steps. A program reads and changes the groups between steps
// (a learning rate, say), reads states, and gives ReduceLROnPlateau the values that it has measured. Engine and program
// own them together. Calls come from the engine's thread. Throws UsageError.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "dsengine/lr_schedule.h"

namespace torch::optim {
class LRScheduler;
class Optimizer;
}  // namespace torch::optim

namespace ds::optimizers {

class Plateau;

// Optimizer states by name.
using NamedStates = std::vector<std::pair<std::string, at::Tensor>>;

// A handle on the optimizer that the ds_config asks for.
//
// It updates the slices of this rank: slice i is the contiguous part of bucket i that this rank owns (the whole bucket
// at stage 0), as one flat tensor of master weights. Its states are flat tensors of the same length.
class ShardOptimizer {
 public:
  virtual ~ShardOptimizer();

  // The learning rate and other options of each parameter group. Change them alike on all ranks, between steps: the
  // next step uses what they are then, and throws UsageError on all ranks where they differ.
  std::vector<GroupOptions>& groups() { return groups_; }
  const std::vector<GroupOptions>& groups() const { return groups_; }
  // The number of optimizer steps begun so far, which bias correction uses.
  int64_t step_count() const { return step_count_; }
  // The type in the spelling of ds_config: "AdamW".
  virtual std::string name() const = 0;

  // The number of slices, one for each bucket.
  virtual int64_t slice_count() const = 0;
  // The state tensors of slice `index`, flat, of the slice's length: {"exp_avg", t}, {"exp_avg_sq", t} of Adam. They
  // share memory with the optimizer; states that are in a file have no memory and cannot be read. Throws
  // std::out_of_range for another index.
  virtual NamedStates states(int64_t index) = 0;
  // The bytes of all states on this rank, counted from the tensors.
  virtual int64_t state_bytes() = 0;

 protected:
  explicit ShardOptimizer(std::vector<GroupOptions> groups);

  std::vector<GroupOptions> groups_;
  int64_t step_count_ = 0;
};

}  // namespace ds::optimizers

namespace ds::engine {

// Returns the learning rate of each parameter group.
std::vector<double> learning_rates(const torch::optim::Optimizer& optimizer);
std::vector<double> learning_rates(const optimizers::ShardOptimizer& optimizer);

// Moves with the optimizer steps and writes learning rates (and what else its rule drives) into the optimizer's groups.
//
// The order is DeepSpeed's: t = last_batch_iteration is -1 at construction and grows by one with each applied (not
// skipped) optimizer step; step number k = 0, 1, ... runs with the values of t = k - 1. Not thread safe.
class LrScheduler {
 public:
  // Writes the values (lr, and betas or momentum where the schedule drives them) of iteration t >= -1 into the groups.
  using Rule = std::function<void(int64_t t, std::vector<optimizers::GroupOptions>& groups)>;

  // Applies the rule for t = -1 at once.
  LrScheduler(std::shared_ptr<optimizers::ShardOptimizer> optimizer, Rule rule);
  // Schedules an optimizer of the program: only lr is read and written.
  LrScheduler(std::shared_ptr<torch::optim::Optimizer> optimizer, Rule rule);
  ~LrScheduler();
  LrScheduler(const LrScheduler&) = delete;
  LrScheduler& operator=(const LrScheduler&) = delete;

  // Makes step(value) lower the rates from now on, beside the rule. `mean_of_ranks` takes this rank's value and returns
  // the mean over all ranks.
  void follow(const optimizers::ReduceLrOnPlateauOptions& options, std::function<double(double)> mean_of_ranks);

  // Returns the rule of a schedule of the config.
  static Rule of(std::shared_ptr<const optimizers::LrSchedule> schedule);
  // Returns the rule "step number k runs with factor(k) times the group's base_lr"; base_lr has one value per group.
  static Rule scaled_by(std::function<double(int64_t k)> factor, std::vector<double> base_lr);

  // Returns the rule of a scheduler of torch's that was made over `optimizer`; InitializeOptions::torch_scheduler has
  // the terms. Throws UsageError for one of another optimizer, or that has stepped.
  static Rule of(std::shared_ptr<torch::optim::LRScheduler> scheduler,
                 std::shared_ptr<torch::optim::Optimizer> optimizer);

  // Goes on by one step. The engine calls it after each applied optimizer step.
  void step();
  // Takes a value that the program has measured, as the loss of a validation: ReduceLROnPlateau's step(metrics) of
  // torch, at any time between steps. Collective: the mean of all ranks' values counts, so that their rates stay equal.
  // Throws UsageError for another schedule.
  void step(double value);
  // Returns what the next optimizer step will run with, one value per parameter group.
  std::vector<double> get_last_lr() const;

  // The whole state, under DeepSpeed's name for it. Loading it writes the groups.
  int64_t last_batch_iteration() const { return last_batch_iteration_; }
  void load_last_batch_iteration(int64_t last_batch_iteration);
  // The state of ReduceLROnPlateau; empty for another schedule.
  std::optional<optimizers::PlateauState> plateau() const;
  void load_plateau(const optimizers::PlateauState& state);

 private:
  void apply();
  void change(const std::function<void(std::vector<optimizers::GroupOptions>& groups)>& write);

  std::shared_ptr<optimizers::ShardOptimizer> optimizer_;  // either this one or client_ is set
  std::shared_ptr<torch::optim::Optimizer> client_;
  Rule rule_;
  std::unique_ptr<optimizers::Plateau> plateau_;  // null: another schedule
  std::function<double(double)> mean_of_ranks_;
  int64_t last_batch_iteration_ = -1;
};

}  // namespace ds::engine
