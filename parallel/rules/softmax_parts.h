// Pieces of a softmax along a dimension that is cut (the vocabulary).
#pragma once

#include "parallel/rules/call.h"

namespace ds::parallel {

// In float32 for 16-bit tensors. With z the greatest along the dimension on any rank: parts of x - z and of exp(x - z),
// and this rank's sum of the latter, which keeps the dimension.
struct SoftmaxParts {
  at::Tensor shifted;
  at::Tensor exponentials;
  at::Tensor own_sum;
};
SoftmaxParts softmax_parts(const Call& call, const Operand& x, int64_t dim);

}  // namespace ds::parallel
