// LambDeviceKernels (optim/device_kernels.h) for CUDA.
#pragma once

#include <cstdint>

#include "optim/device_kernels.h"

namespace ds::optimizers {

const char* advance_lamb_runs(const LambRun* runs, int64_t count, const UpdateScale& scale, const LambSums& sums,
                              void* stream);
const char* apply_lamb_runs(const LambRun* runs, int64_t count, const UpdateScale& scale, const LambSums& sums,
                            void* stream);

}  // namespace ds::optimizers
