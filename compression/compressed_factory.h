// From a name and its parameters to an optimizer of the 1-bit family.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "compression/compressed_optimizer.h"
#include "dsengine/comm.h"
#include "optim/optimizer_factory.h"

namespace ds::compression {

// What these optimizers have beside optimizers::OptimizerOptions. Defaults are DeepSpeed's.
struct CompressedOptions {
  int64_t freeze_step = 100000;  // OneBitAdam, OneBitLamb
  double coeff_beta = 0.9;       // OneBitLamb
  double factor_max = 4.0;
  double factor_min = 0.5;
  double factor_threshold = 0.1;
  int64_t var_freeze_step = 100000;  // ZeroOneAdam
  int64_t var_update_scaler = 16;
  int64_t local_step_scaler = 32678;
  int64_t local_step_clipper = 16;
  bool deepspeed_semantics = false;
};

// For the types OneBitAdam, OneBitLamb and ZeroOneAdam. `communicator`: all ranks that train the same buckets; outlives
// the optimizer. Throws ConfigError for another type, or values out of range.
std::unique_ptr<CompressedOptimizer> make_compressed_optimizer(const optimizers::OptimizerOptions& options,
                                                               const CompressedOptions& compressed,
                                                               comm::Communicator& communicator);

}  // namespace ds::compression
