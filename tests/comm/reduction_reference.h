// What reductions must give, by LibTorch operators one rank after another.
#pragma once

#include <torch/torch.h>

#include <vector>

#include "dsengine/comm.h"

namespace ds::test {

inline const std::vector<at::ScalarType>& communicated_types() {
  static const std::vector<at::ScalarType> kTypes = {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf, at::kChar,
                                                     at::kByte,  at::kShort,  at::kInt,      at::kLong, at::kBool};
  return kTypes;
}

inline bool reducible(at::ScalarType dtype, comm::ReduceOp op) {
  using comm::ReduceOp;
  const bool bitwise = op == ReduceOp::kBand || op == ReduceOp::kBor || op == ReduceOp::kBxor;
  if (dtype == at::kBool) {
    return op == ReduceOp::kMin || op == ReduceOp::kMax || op == ReduceOp::kBand || op == ReduceOp::kBor;
  }
  return !bitwise || at::isIntegralType(dtype, false);
}

// Values that no rounding leaves exact; another sequence for every rank and seed, the same in every run.
inline at::Tensor rank_values(int64_t numel, at::ScalarType dtype, int rank, int seed = 0) {
  const at::Tensor index = torch::arange(numel, torch::kDouble) + (1000.0 * rank + 17.0 * seed);
  const at::Tensor value = torch::sin(index * 12.9898) * 3.7;
  if (dtype == at::kBool) return value > 0;
  if (dtype == at::kByte) return (value * 30 + 112).to(dtype);
  if (at::isIntegralType(dtype, false)) return (value * 30).to(dtype);
  return value.to(dtype);
}

inline at::Tensor combine(const at::Tensor& a, const at::Tensor& b, comm::ReduceOp op) {
  switch (op) {
    case comm::ReduceOp::kSum:
    case comm::ReduceOp::kAvg:
      return a + b;
    case comm::ReduceOp::kProduct:
      return a * b;
    case comm::ReduceOp::kMin:
      return torch::minimum(a, b);
    case comm::ReduceOp::kMax:
      return torch::maximum(a, b);
    case comm::ReduceOp::kBand:
      return torch::bitwise_and(a, b);
    case comm::ReduceOp::kBor:
      return torch::bitwise_or(a, b);
    case comm::ReduceOp::kBxor:
      return torch::bitwise_xor(a, b);
  }
  throw std::logic_error("unknown operation");
}

// In rank order; bfloat16 and float16 in float32, rounded once at the end.
inline at::Tensor reduced(const std::vector<at::Tensor>& of_ranks, comm::ReduceOp op) {
  const at::ScalarType dtype = of_ranks[0].scalar_type();
  const bool low = dtype == at::kBFloat16 || dtype == at::kHalf;
  at::Tensor total = low ? of_ranks[0].to(at::kFloat) : of_ranks[0].clone();
  for (size_t r = 1; r < of_ranks.size(); ++r)
    total = combine(total, low ? of_ranks[r].to(at::kFloat) : of_ranks[r], op);
  if (op == comm::ReduceOp::kAvg) {
    const auto ranks = static_cast<int64_t>(of_ranks.size());
    total = at::isIntegralType(dtype, false) ? torch::div(total, ranks, "trunc") : total / static_cast<double>(ranks);
  }
  return total.to(dtype);
}

inline at::Tensor reduced_values(int world, int64_t numel, at::ScalarType dtype, comm::ReduceOp op, int seed = 0) {
  std::vector<at::Tensor> of_ranks;
  for (int rank = 0; rank < world; ++rank) of_ranks.push_back(rank_values(numel, dtype, rank, seed));
  return reduced(of_ranks, op);
}

}  // namespace ds::test
