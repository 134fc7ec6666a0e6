// Steps along an average over a variance that does not change any more.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "dsengine/lr_schedule.h"

namespace ds::compression {

// sqrt(variance) / sqrt(correction) + eps, new memory.
at::Tensor denominator(const at::Tensor& variance, double correction, double eps);

struct FrozenStep {
  double average_correction = 1.0;   // 1 - beta1^t
  double variance_correction = 1.0;  // 1 - beta2^n, n updates of the variance
};

// master = (1 - lr decay) master - lr / average_correction * direction, for flat tensors of equal length, in bounded
// memory.
void apply_frozen(const at::Tensor& master, const at::Tensor& average, const at::Tensor& variance,
                  const optimizers::GroupOptions& group, const FrozenStep& step);

}  // namespace ds::compression
