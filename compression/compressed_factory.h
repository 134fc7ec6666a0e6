// Makes an optimizer of the 1-bit family from a name and its values; all others are made in optim/optimizer_factory.h.
#pragma once

#include <memory>

#include "compression/compressed_optimizer.h"
#include "dsengine/comm.h"
#include "optim/optimizer_factory.h"

namespace ds::compression {

// Makes OneBitAdam, OneBitLamb and ZeroOneAdam. `communicator`: all ranks that train the same buckets; it outlives the
// optimizer. Throws ConfigError for another type, or values out of range.
std::unique_ptr<CompressedOptimizer> make_compressed_optimizer(const optimizers::OptimizerOptions& options,
                                                               comm::Communicator& communicator);

}  // namespace ds::compression
