// clip_grad_norm_() of fully_shard: gradient norms over slices, and the rule of optim/clip.h. Every element of the
// model belongs to one rank, and padding has no gradient. A parameter that is replicated along a tensor axis counts on
// the first rank of the axis.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/check.h"
#include "loops/sharded_state.h"
#include "optim/clip.h"
#include "zero/square_sum.h"

namespace ds::loops {
namespace {

// The sum of |g|^p over this rank's gradients, or, where p is infinite, the largest |g|.
double own_norm(const ShardedModel& model, double p) {
  zero::SquareSum squares;
  double other = 0;
  for (const SliceLeaf& leaf : model.leaves()) {
    const at::Tensor& gradient = leaf.tensor.grad();
    if (!gradient.defined() || gradient.numel() == 0 || !model.state().counts(leaf.bucket)) continue;
    if (p == 2.0) {
      squares.add(gradient);
    } else if (std::isinf(p)) {
      const auto largest = gradient.abs().max().item<double>();
      other = std::isnan(largest) ? largest : std::max(other, largest);
    } else {
      other += gradient.abs().to(at::kDouble).pow(p).sum().item<double>();
    }
  }
  return p == 2.0 ? squares.total() : other;
}

}  // namespace

double clip_gradients(const ShardedModel& model, double max_norm, double norm_type) {
  require(norm_type > 0, "clip_grad_norm_: norm_type: expected a positive number or infinity, found ", norm_type);
  const at::NoGradGuard no_grad;
  const bool largest = std::isinf(norm_type);
  const at::Tensor joined =
      at::full({1}, own_norm(model, norm_type), at::TensorOptions().dtype(at::kDouble).device(model.ranks().device));
  const auto op = largest ? comm::ReduceOp::kMax : comm::ReduceOp::kSum;
  model.ranks().shards->all_reduce(joined, op, "gradient norm of slices").wait();
  if (model.ranks().tensor) model.ranks().tensor->all_reduce(joined, op, "gradient norm of parts").wait();
  const auto total = joined.item<double>();
  const double norm = largest ? total : std::pow(total, 1.0 / norm_type);
  std::vector<at::Tensor> tensors;
  for (const SliceLeaf& leaf : model.leaves()) tensors.push_back(leaf.tensor);
  optimizers::clip_to_norm(tensors, norm, max_norm);
  return norm;
}

}  // namespace ds::loops
