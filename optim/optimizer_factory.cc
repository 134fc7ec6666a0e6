#include "optim/optimizer_factory.h"

#include <cmath>

#include "core/check.h"
#include "optim/adagrad.h"
#include "optim/adam.h"
#include "optim/lamb.h"
#include "optim/lion.h"
#include "optim/muon.h"
#include "optim/sgd.h"
#include "optim/torch_optimizers.h"

namespace ds::optimizers {
namespace {

const OptimizerDescription& description_of(const std::string& type) {
  const OptimizerDescription* const row = find_optimizer(type);
  const auto is_made_here = [](const OptimizerDescription& one) { return !one.compresses; };
  require<ConfigError>(row != nullptr && is_made_here(*row), "optimizer.type: expected ", optimizer_names(is_made_here),
                       ", found \"", type, "\"");
  return *row;
}

// Throws ConfigError for values that torch.optim refuses.
void check_group(const GroupOptions& group) {
  const auto check = [](bool holds, const char* key, const char* rule, double found) {
    require<ConfigError>(holds, "optimizer.params.", key, ": expected ", rule, ", found ", found);
  };
  check(std::isfinite(group.lr) && group.lr >= 0, "lr", "a number of at least 0", group.lr);
  check(group.weight_decay >= 0, "weight_decay", "at least 0", group.weight_decay);
  check(group.beta1 >= 0 && group.beta1 < 1, "betas[0]", "at least 0 and below 1", group.beta1);
  check(group.beta2 >= 0 && group.beta2 < 1, "betas[1]", "at least 0 and below 1", group.beta2);
  check(group.momentum >= 0, "momentum", "at least 0", group.momentum);
  check(group.eps >= 0, "eps", "at least 0", group.eps);
}

std::unique_ptr<SliceOptimizer> make_of_torch(TorchAlgorithm algorithm, const OptimizerOptions& options) {
  const OptimizerParams& values = options.values;
  return std::make_unique<TorchOptimizer>(options.groups,
                                          TorchRule{.algorithm = algorithm,
                                                    .alpha = values.alpha,
                                                    .centered = values.centered,
                                                    .rho = values.rho,
                                                    .momentum_decay = values.momentum_decay,
                                                    .decoupled_weight_decay = values.decoupled_weight_decay});
}

}  // namespace

GroupOptions default_group_options(const std::string& type) { return group_options(description_of(type).defaults); }

GroupOptions default_aux_adam_options() { return *description_of("Muon").values_of_rest; }

LambRule lamb_rule(const OptimizerParams& values) {
  return {values.bias_correction, values.eps_inside_sqrt, values.max_coeff, values.min_coeff};
}

void require_groups(const std::vector<GroupOptions>& groups) {
  require<ConfigError>(!groups.empty(), "optimizer: expected at least one parameter group, found none");
  for (const GroupOptions& group : groups) check_group(group);
}

std::unique_ptr<SliceOptimizer> make_optimizer(const OptimizerOptions& options) {
  require_groups(options.groups);
  const OptimizerParams& values = options.values;
  switch (description_of(options.type).type) {
    case OptimizerType::kAdam:
      return std::make_unique<Adam>(options.groups,
                                    AdamRule{values.adam_w_mode, values.bias_correction, values.amsgrad});
    case OptimizerType::kAdamW:
      return std::make_unique<Adam>(options.groups, AdamRule{true, values.bias_correction, values.amsgrad});
    case OptimizerType::kSgd:
      return std::make_unique<Sgd>(options.groups, SgdRule{values.dampening, values.nesterov});
    case OptimizerType::kAdagrad:
      return std::make_unique<Adagrad>(options.groups, AdagradRule{values.lr_decay, values.initial_accumulator_value});
    case OptimizerType::kSparseAdam:
      return std::make_unique<Adam>(options.groups, AdamRule{.decoupled_weight_decay = false, .lazy = true});
    case OptimizerType::kLion:
      return std::make_unique<Lion>(options.groups);
    case OptimizerType::kLamb:
      return std::make_unique<Lamb>(options.groups, lamb_rule(values));
    case OptimizerType::kMuon:
      return std::make_unique<Muon>(
          options.groups, values.ns_method == "standard" ? NewtonSchulzMethod::kStandard : NewtonSchulzMethod::kGram,
          AdamRule{.decoupled_weight_decay = values.adam_w_mode}, options.block_rows);
    case OptimizerType::kRmsprop:
      return make_of_torch(TorchAlgorithm::kRmsprop, options);
    case OptimizerType::kAdamax:
      return make_of_torch(TorchAlgorithm::kAdamax, options);
    case OptimizerType::kNadam:
      return make_of_torch(TorchAlgorithm::kNadam, options);
    case OptimizerType::kRadam:
      return make_of_torch(TorchAlgorithm::kRadam, options);
    case OptimizerType::kAdadelta:
      return make_of_torch(TorchAlgorithm::kAdadelta, options);
    case OptimizerType::kOneBitAdam:
    case OptimizerType::kOneBitLamb:
    case OptimizerType::kZeroOneAdam:
      break;  // compression/compressed_factory.h makes them
  }
  throw InternalError("optimizer type without a maker");
}

}  // namespace ds::optimizers
