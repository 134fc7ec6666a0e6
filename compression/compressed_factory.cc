#include "compression/compressed_factory.h"

#include "compression/onebit_adam.h"
#include "compression/onebit_lamb.h"
#include "compression/zero_one_adam.h"
#include "core/check.h"

namespace ds::compression {

std::unique_ptr<CompressedOptimizer> make_compressed_optimizer(const optimizers::OptimizerOptions& options,
                                                               comm::Communicator& communicator) {
  using optimizers::OptimizerDescription;
  using optimizers::OptimizerType;
  optimizers::require_groups(options.groups);
  const optimizers::OptimizerParams& values = options.values;
  const OptimizerDescription* const row = optimizers::find_optimizer(options.type);
  const auto compresses = [](const OptimizerDescription& one) { return one.compresses; };
  require<ConfigError>(row != nullptr && row->compresses, "optimizer.type: expected ",
                       optimizers::optimizer_names(compresses), ", found ", options.type);
  if (row->type == OptimizerType::kOneBitAdam) {
    return std::make_unique<OneBitAdam>(options.groups,
                                        OneBitAdamRule{.freeze_step = values.freeze_step,
                                                       .bias_correction = values.bias_correction,
                                                       .deepspeed_semantics = values.deepspeed_semantics},
                                        communicator);
  }
  if (row->type == OptimizerType::kOneBitLamb) {
    return std::make_unique<OneBitLamb>(options.groups,
                                        OneBitLambRule{.lamb = optimizers::lamb_rule(values),
                                                       .freeze_step = values.freeze_step,
                                                       .coeff_beta = values.coeff_beta,
                                                       .factor_max = values.factor_max,
                                                       .factor_min = values.factor_min,
                                                       .factor_threshold = values.factor_threshold,
                                                       .deepspeed_semantics = values.deepspeed_semantics},
                                        communicator);
  }
  return std::make_unique<ZeroOneAdam>(options.groups,
                                       ZeroOneRule{.var_freeze_step = values.var_freeze_step,
                                                   .var_update_scaler = values.var_update_scaler,
                                                   .local_step_scaler = values.local_step_scaler,
                                                   .local_step_clipper = values.local_step_clipper,
                                                   .bias_correction = values.bias_correction,
                                                   .deepspeed_semantics = values.deepspeed_semantics},
                                       communicator);
}

}  // namespace ds::compression
