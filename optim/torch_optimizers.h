// RMSprop, Adamax, NAdam, RAdam and Adadelta as torch.optim has them (torch 2.11, single tensor), on flat slices, by
// LibTorch's operators.
#pragma once

#include <string>
#include <vector>

#include "optim/shard_optimizer.h"

namespace ds::optimizers {

enum class TorchAlgorithm { kRmsprop, kAdamax, kNadam, kRadam, kAdadelta };

// Beside the groups' values.
struct TorchRule {
  TorchAlgorithm algorithm = TorchAlgorithm::kRmsprop;
  double alpha = 0.99;                  // RMSprop
  bool centered = false;                // RMSprop
  double rho = 0.9;                     // Adadelta
  double momentum_decay = 4e-3;         // NAdam
  bool decoupled_weight_decay = false;  // NAdam, RAdam
};

class TorchOptimizer final : public SliceOptimizer {
 public:
  // Throws ConfigError for values that torch.optim refuses.
  TorchOptimizer(std::vector<GroupOptions> groups, TorchRule rule);
  void begin_step() override;
  void update(int64_t index, const at::Tensor& gradient, double gradient_scale) override;
  NamedStates states(int64_t index) override { return states_.at(static_cast<size_t>(index)); }
  // NAdam: the product of its momenta so far, "mu_product", of each group.
  NamedStates shared_states() override;
  void states_changed(bool rank_states) override;
  OptimizerTraits traits() const override;
  std::string name() const override;

 protected:
  void allocate_states(int64_t index, const NewState& new_state) override;

 private:
  // One step of elements: master, gradient and states of [length]; the gradient may be overwritten.
  struct Elements {
    const at::Tensor& weights;
    const at::Tensor& gradient;
    const std::vector<at::Tensor>& states;
  };
  std::vector<std::string> state_names() const;
  double momentum_of(const GroupOptions& group, int64_t step) const;
  void decay(const GroupOptions& group, const Elements& own) const;
  void rmsprop(const GroupOptions& group, const Elements& own) const;
  void adamax(const GroupOptions& group, const Elements& own) const;
  void nadam(const GroupOptions& group, double mu_product, const Elements& own) const;
  void radam(const GroupOptions& group, const Elements& own) const;
  void adadelta(const GroupOptions& group, const Elements& own) const;

  TorchRule rule_;
  bool has_momentum_ = false;
  std::vector<NamedStates> states_;  // by slice
  // float64 [groups], after the step of that number, and before it: a step that is taken back comes again.
  at::Tensor mu_product_, mu_before_;
  int64_t mu_step_ = 0;
};

}  // namespace ds::optimizers
