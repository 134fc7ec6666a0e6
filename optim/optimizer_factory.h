// From a name and its parameters to an optimizer.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "optim/newton_schulz.h"
#include "optim/shard_optimizer.h"

namespace ds::optimizers {

// Everything ds_config's optimizer section can say; each optimizer reads its own fields. Defaults are DeepSpeed's (SGD
// and lr_decay: torch.optim's).
struct OptimizerOptions {
  // Adam, AdamW, SGD, Adagrad, Lion, Lamb, Muon, RMSprop, Adamax, NAdam, RAdam or Adadelta, in any case.
  std::string type = "AdamW";
  std::vector<GroupOptions> groups = {GroupOptions{}};

  // Adam, Muon's other half. AdamW is Adam with decoupled weight decay, whatever adam_w_mode says.
  bool adam_w_mode = true;
  bool amsgrad = false;                                      // Adam, AdamW
  bool bias_correction = true;                               // Adam, AdamW, Lamb
  double dampening = 0.0;                                    // SGD
  bool nesterov = false;                                     // SGD
  double lr_decay = 0.0;                                     // Adagrad
  double initial_accumulator_value = 0.0;                    // Adagrad
  double max_coeff = 10.0;                                   // Lamb
  double min_coeff = 0.01;                                   // Lamb
  bool eps_inside_sqrt = false;                              // Lamb
  NewtonSchulzMethod ns_method = NewtonSchulzMethod::kGram;  // Muon
  // Muon, by parameter: rows that are made orthogonal by themselves; 0, or empty: the matrix is one.
  std::vector<int64_t> block_rows;
  double alpha = 0.99;                  // RMSprop
  bool centered = false;                // RMSprop
  double rho = 0.9;                     // Adadelta
  double momentum_decay = 4e-3;         // NAdam
  bool decoupled_weight_decay = false;  // NAdam, RAdam
};

// What a group has when the config says nothing: lr 1e-3 (Adagrad, RMSprop 1e-2, Muon 0.02, Adamax, NAdam
// 2e-3, Adadelta 1), betas, eps, momentum. Throws
// ConfigError for an unknown type. Muon's groups for the other parameters: default_aux_adam_options().
GroupOptions default_group_options(const std::string& type);
GroupOptions default_aux_adam_options();

// Throws ConfigError for no group, or values that torch.optim refuses.
void require_groups(const std::vector<GroupOptions>& groups);

// Throws ConfigError for an unknown type (naming the known ones) or values out of range.
std::unique_ptr<SliceOptimizer> make_optimizer(const OptimizerOptions& options);

}  // namespace ds::optimizers
