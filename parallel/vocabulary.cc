// Functions for programs that have scores over a vocabulary that is cut.
#include <ATen/TensorOperators.h>
#include <ATen/core/Reduction.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/log_softmax.h>

#include "core/check.h"
#include "dsengine/parallel.h"
#include "parallel/rules/dtypes.h"

namespace ds::parallel {

at::Tensor log_probabilities(const at::Tensor& scores, const at::Tensor& targets, int64_t ignore_index) {
  const bool fits = scores.dim() >= 1 && scores.is_floating_point() && targets.scalar_type() == at::kLong &&
                    targets.sizes() == scores.sizes().slice(0, scores.dim() - 1);
  require(fits, "log_probabilities() takes floating-point scores [..., classes] and int64 targets [...], found ",
          c10::toString(scores.scalar_type()), " scores of sizes ", scores.sizes(), " and ",
          c10::toString(targets.scalar_type()), " targets of sizes ", targets.sizes());
  const at::Tensor rows = scores.to(wide_type(scores.scalar_type())).reshape({targets.numel(), scores.size(-1)});
  const at::Tensor losses = at::cross_entropy_loss(rows, targets.reshape({-1}), {}, at::Reduction::None, ignore_index);
  return losses.neg().view(targets.sizes());
}

at::Tensor entropy(const at::Tensor& scores) {
  require(scores.dim() >= 1 && scores.is_floating_point(),
          "entropy() takes floating-point scores [..., classes], found ", c10::toString(scores.scalar_type()),
          " scores of sizes ", scores.sizes());
  const at::Tensor logarithms = at::log_softmax(scores.to(wide_type(scores.scalar_type())), -1);
  const at::Tensor probabilities = logarithms.exp();
  // 0 times minus infinity is no number.
  return (probabilities * logarithms.masked_fill(probabilities.eq(0), 0)).sum(-1).neg();
}

}  // namespace ds::parallel
