// One collective on tensors of one size: calls it, and compares its result with the expected values.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>

#include "dsengine/comm.h"
#include "tools/bench/bandwidth.h"

namespace ds::tool::bench {

// Small integers that every rank can compute for every other: the exact result of a collective in any dtype. Values
// repeat after a prime number of elements, so that no part of a tensor can stand for another one.
class ExpectedValues {
 public:
  // `reduced`: sums over the ranks must be exact in `dtype`, so values are small and, beyond what it can count to, zero
  // on the last ranks.
  ExpectedValues(at::ScalarType dtype, at::Device device, int ranks, bool reduced);

  // Elements `start` to `start + count` - 1 of the input of a rank.
  at::Tensor of_rank(int rank, int64_t start, int64_t count) const;
  // Elements `start` to `start + count` - 1 of the reduction over all ranks: sum, min or max.
  at::Tensor of_all(comm::ReduceOp op, int64_t start, int64_t count) const;
  // A value that no result contains.
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

struct TrialOptions {
  Operation operation = Operation::kAllReduce;
  int64_t count = 1;  // as in Amount
  bool in_place = false;
  at::ScalarType dtype = at::kFloat;
  at::Device device = at::kCPU;
  comm::ReduceOp reduce_op = comm::ReduceOp::kSum;
  int root = 0;
};

// Whether the Communicator offers the operation so: all_reduce, broadcast and reduce are in place, all_to_all and
// sendrecv are not, all_gather and reduce_scatter are both.
bool is_offered(Operation operation, bool in_place);
bool is_reduction(Operation operation);

// Every rank makes the same trials and calls the same functions in the same order. Throws
// CommError as the communicator does.
class Trial {
 public:
  Trial(comm::Communicator& ranks, const TrialOptions& options);

  // Calls it once. On CUDA the current stream is ordered after it, else it has finished.
  void run();
  // Microseconds of a call on this rank: the mean of `iterations` after `warmup` others.
  double time(int warmup, int iterations);
  // Fills the tensors, calls it once, and counts the elements of this rank that are not what they must be.
  int64_t count_wrong();

 private:
  void fill();
  at::Tensor expected() const;  // value of result_; undefined where this rank gets nothing

  comm::Communicator& ranks_;
  TrialOptions options_;
  ExpectedValues values_;
  at::Tensor input_;
  at::Tensor result_;  // may be input_ or a part of it, or input_ a part of it
};

}  // namespace ds::tool::bench
