#include "compression/compressed_factory.h"

#include "compression/onebit_adam.h"
#include "compression/onebit_lamb.h"
#include "compression/zero_one_adam.h"
#include "core/check.h"

namespace ds::compression {

std::unique_ptr<CompressedOptimizer> make_compressed_optimizer(const optimizers::OptimizerOptions& options,
                                                               const CompressedOptions& compressed,
                                                               comm::Communicator& communicator) {
  optimizers::require_groups(options.groups);
  if (options.type == "OneBitAdam") {
    return std::make_unique<OneBitAdam>(options.groups,
                                        OneBitAdamRule{.freeze_step = compressed.freeze_step,
                                                       .bias_correction = options.bias_correction,
                                                       .deepspeed_semantics = compressed.deepspeed_semantics},
                                        communicator);
  }
  if (options.type == "OneBitLamb") {
    const optimizers::LambRule lamb{options.bias_correction, options.eps_inside_sqrt, options.max_coeff,
                                    options.min_coeff};
    return std::make_unique<OneBitLamb>(options.groups,
                                        OneBitLambRule{.lamb = lamb,
                                                       .freeze_step = compressed.freeze_step,
                                                       .coeff_beta = compressed.coeff_beta,
                                                       .factor_max = compressed.factor_max,
                                                       .factor_min = compressed.factor_min,
                                                       .factor_threshold = compressed.factor_threshold,
                                                       .deepspeed_semantics = compressed.deepspeed_semantics},
                                        communicator);
  }
  require<ConfigError>(options.type == "ZeroOneAdam", "optimizer.type: expected OneBitAdam, OneBitLamb or ",
                       "ZeroOneAdam, found ", options.type);
  return std::make_unique<ZeroOneAdam>(options.groups,
                                       ZeroOneRule{.var_freeze_step = compressed.var_freeze_step,
                                                   .var_update_scaler = compressed.var_update_scaler,
                                                   .local_step_scaler = compressed.local_step_scaler,
                                                   .local_step_clipper = compressed.local_step_clipper,
                                                   .bias_correction = options.bias_correction,
                                                   .deepspeed_semantics = compressed.deepspeed_semantics},
                                       communicator);
}

}  // namespace ds::compression
