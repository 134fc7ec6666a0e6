// Small integers that every rank can compute for every other: what a collective must give, exactly, in any dtype.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>

#include "dsengine/comm.h"

namespace ds::tool::bench {

// Values repeat after a prime number of elements, so that no part of a tensor can stand for another one.
class ExpectedValues {
 public:
  // `reduced`: sums over the ranks must be exact in `dtype`, so values are small and, beyond what it can count to, zero
  // on the last ranks.
  ExpectedValues(at::ScalarType dtype, at::Device device, int ranks, bool reduced);

  // Elements `start` to `start + count` - 1 of what a rank gives.
  at::Tensor of_rank(int rank, int64_t start, int64_t count) const;
  // The same of the reduction over all ranks: sum, min or max.
  at::Tensor of_all(comm::ReduceOp op, int64_t start, int64_t count) const;
  // No element of any result.
  double never() const { return 127; }

 private:
  int64_t value(int rank, int64_t position) const;
  at::Tensor repeat(const std::vector<double>& period, int64_t start, int64_t count) const;

  at::ScalarType dtype_;
  at::Device device_;
  int ranks_;
  int64_t limit_;  // values are below it
  int giving_;     // ranks with values other than zero
};

}  // namespace ds::tool::bench
