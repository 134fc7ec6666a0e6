#include "optim/optimizer_factory.h"

#include <algorithm>
#include <cctype>
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

enum class Type { kAdam, kAdamW, kSgd, kAdagrad, kLion, kLamb, kMuon, kRmsprop, kAdamax, kNadam, kRadam, kAdadelta };

Type parse_type(const std::string& name) {
  std::string lower = name;
  std::transform(lower.begin(), lower.end(), lower.begin(), [](unsigned char c) { return std::tolower(c); });
  constexpr std::pair<const char*, Type> kTypes[] = {
      {"adam", Type::kAdam},     {"adamw", Type::kAdamW}, {"sgd", Type::kSgd},     {"adagrad", Type::kAdagrad},
      {"lion", Type::kLion},     {"lamb", Type::kLamb},   {"muon", Type::kMuon},   {"rmsprop", Type::kRmsprop},
      {"adamax", Type::kAdamax}, {"nadam", Type::kNadam}, {"radam", Type::kRadam}, {"adadelta", Type::kAdadelta},
  };
  for (const auto& [known, type] : kTypes) {
    if (lower == known) return type;
  }
  throw ConfigError(cat(
      "optimizer.type: expected one of Adam, AdamW, SGD, Adagrad, Lion, Lamb, Muon, RMSprop, Adamax, NAdam, RAdam, ",
      "Adadelta, found \"", name, "\""));
}

// As torch.optim refuses them.
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
  return std::make_unique<TorchOptimizer>(options.groups,
                                          TorchRule{.algorithm = algorithm,
                                                    .alpha = options.alpha,
                                                    .centered = options.centered,
                                                    .rho = options.rho,
                                                    .momentum_decay = options.momentum_decay,
                                                    .decoupled_weight_decay = options.decoupled_weight_decay});
}

}  // namespace

GroupOptions default_aux_adam_options() { return {.lr = 3e-4, .beta2 = 0.95, .eps = 1e-10}; }

GroupOptions default_group_options(const std::string& type) {
  switch (parse_type(type)) {
    case Type::kAdagrad:
      return {.lr = 1e-2, .eps = 1e-10};
    case Type::kMuon:
      return {.lr = 0.02, .beta2 = 0.95, .momentum = 0.95, .eps = 1e-10};
    case Type::kRmsprop:
      return {.lr = 1e-2};
    case Type::kAdamax:
    case Type::kNadam:
      return {.lr = 2e-3};
    case Type::kAdadelta:
      return {.lr = 1.0, .eps = 1e-6};
    default:
      return {};
  }
}

void require_groups(const std::vector<GroupOptions>& groups) {
  require<ConfigError>(!groups.empty(), "optimizer: expected at least one parameter group, found none");
  for (const GroupOptions& group : groups) check_group(group);
}

std::unique_ptr<SliceOptimizer> make_optimizer(const OptimizerOptions& options) {
  require_groups(options.groups);
  const AdamRule adam{.decoupled_weight_decay = options.adam_w_mode,
                      .bias_correction = options.bias_correction,
                      .amsgrad = options.amsgrad};
  switch (parse_type(options.type)) {
    case Type::kAdam:
      return std::make_unique<Adam>(options.groups, adam);
    case Type::kAdamW:
      return std::make_unique<Adam>(options.groups, AdamRule{true, adam.bias_correction, adam.amsgrad});
    case Type::kSgd:
      return std::make_unique<Sgd>(options.groups, SgdRule{options.dampening, options.nesterov});
    case Type::kAdagrad:
      return std::make_unique<Adagrad>(options.groups,
                                       AdagradRule{options.lr_decay, options.initial_accumulator_value});
    case Type::kLion:
      return std::make_unique<Lion>(options.groups);
    case Type::kLamb:
      return std::make_unique<Lamb>(options.groups, LambRule{options.bias_correction, options.eps_inside_sqrt,
                                                             options.max_coeff, options.min_coeff});
    case Type::kMuon:
      return std::make_unique<Muon>(options.groups, options.ns_method,
                                    AdamRule{.decoupled_weight_decay = options.adam_w_mode}, options.block_rows);
    case Type::kRmsprop:
      return make_of_torch(TorchAlgorithm::kRmsprop, options);
    case Type::kAdamax:
      return make_of_torch(TorchAlgorithm::kAdamax, options);
    case Type::kNadam:
      return make_of_torch(TorchAlgorithm::kNadam, options);
    case Type::kRadam:
      return make_of_torch(TorchAlgorithm::kRadam, options);
    case Type::kAdadelta:
      return make_of_torch(TorchAlgorithm::kAdadelta, options);
  }
  throw InternalError("optimizer type without a maker");
}

}  // namespace ds::optimizers
