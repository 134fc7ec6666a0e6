#include "compression/frozen_variance.h"

#include <cmath>

#include "optim/chunked_update.h"
#include "optim/rounded_sqrt.h"

namespace ds::compression {

at::Tensor denominator(const at::Tensor& variance, double correction, double eps) {
  at::Tensor result = optimizers::rounded_sqrt(variance);
  if (correction != 1.0) result.div_(std::sqrt(correction));
  return result.add_(eps);
}

void apply_frozen(const at::Tensor& master, const at::Tensor& average, const at::Tensor& variance,
                  const optimizers::GroupOptions& group, const FrozenStep& step) {
  const double rate = group.lr / step.average_correction;
  const double decay = 1 - group.lr * group.weight_decay;
  optimizers::for_each_chunk(master, average, optimizers::KernelMemory::kTemporaries,
                             [&](int64_t begin, const at::Tensor& w, const at::Tensor& a) {
                               at::Tensor divisor = denominator(variance.narrow(0, begin, w.numel()),
                                                                step.variance_correction, group.eps);
                               if (decay != 1.0) w.mul_(decay);
                               w.sub_(a.div(divisor).mul_(rate));
                             });
}

}  // namespace ds::compression
