// Square roots that are the same on every machine.
#pragma once

#include <ATen/core/Tensor.h>

namespace ds::optimizers {

// The square roots, in new memory. Those of float32 on a CPU are correctly rounded (kernels/square_root.h). Ranks that
// make the same weights from the same averages, each by itself, must not depend on the CPUs they run on.
at::Tensor rounded_sqrt(const at::Tensor& values);

}  // namespace ds::optimizers
