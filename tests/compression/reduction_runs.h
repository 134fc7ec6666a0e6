// Compressed reductions of ranks as threads: how they are made, gradients, and what is right.
#pragma once

#include <torch/torch.h>

#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "comm/subgroups.h"
#include "compression/block_quantized_reduction.h"
#include "compression/node_reduction.h"
#include "compression/power_sgd_reduction.h"
#include "compression/top_k_reduction.h"
#include "tests/support/thread_ranks.h"

namespace ds::test {

using comm::BucketReduction;
using comm::Communicator;
using comm::ReduceOp;

inline std::shared_ptr<Communicator> lent(Communicator& communicator) {
  return {std::shared_ptr<void>(), &communicator};
}

inline compression::ExchangeGroups exchange_groups(const std::shared_ptr<Communicator>& group) {
  std::vector<int> ranks(static_cast<size_t>(group->size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return {group, group->new_group(ranks, "second")};
}

// A gradient of one rank in one step; `dtype` as it would come.
inline at::Tensor gradient_of(int64_t numel, int rank, int64_t step, at::ScalarType dtype = at::kFloat) {
  const at::Tensor index = torch::arange(numel, torch::kDouble) * 1.7 + static_cast<double>(1000 * rank + 77 * step);
  return (torch::sin(index * 12.9898) * torch::cos(index * 0.3).pow(3) * 2.5).to(dtype);
}

// Of all ranks, in float64.
inline at::Tensor summed_gradients(int64_t numel, int world, int64_t step, at::ScalarType dtype = at::kFloat) {
  at::Tensor sum = torch::zeros({numel}, torch::kDouble);
  for (int rank = 0; rank < world; ++rank) sum += gradient_of(numel, rank, step, dtype).to(torch::kDouble);
  return sum;
}

inline at::Tensor error_of(const BucketReduction& reduction, size_t bucket = 0) {
  for (const auto& [name, tensor] : reduction.memory()) {
    if (name == "error." + std::to_string(bucket)) return tensor;
  }
  return {};
}

// The whole result on every rank. `scatter`: by a reduce-scatter, whose parts are joined.
inline at::Tensor reduce(BucketReduction& reduction, Communicator& world, const at::Tensor& gradient, bool scatter,
                         ReduceOp op = ReduceOp::kSum, size_t bucket = 0) {
  at::Tensor flat = gradient.clone();
  if (!scatter) {
    reduction.start(bucket, flat, flat, op, "gradients").wait();
    return flat;
  }
  const at::Tensor own = flat.chunk(world.size())[static_cast<size_t>(world.rank())];
  reduction.start(bucket, own, flat, op, "gradients").wait();
  at::Tensor whole = torch::empty_like(flat);
  world.all_gather(whole, own.clone()).wait();
  return whole;
}

inline at::Tensor sum_over_ranks(const at::Tensor& values, Communicator& world) {
  at::Tensor sum = values.to(torch::kDouble).clone();
  world.all_reduce(sum).wait();
  return sum;
}

// Every rank holds the same bits.
inline bool same_on_all_ranks(const at::Tensor& values, Communicator& world) {
  at::Tensor first = values.clone();
  world.broadcast(first, 0).wait();
  return torch::equal(first, values);
}

}  // namespace ds::test
