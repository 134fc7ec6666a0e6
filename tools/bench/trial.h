// One collective on tensors of one size: called, and its result compared with what it must be.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>

#include "dsengine/comm.h"
#include "tools/bench/bandwidth.h"
#include "tools/bench/expected_values.h"

namespace ds::tool::bench {

struct TrialOptions {
  Operation operation = Operation::kAllReduce;
  int64_t count = 1;  // as Amount
  bool in_place = false;
  at::ScalarType dtype = at::kFloat;
  at::Device device = at::kCPU;
  comm::ReduceOp reduce_op = comm::ReduceOp::kSum;
  int root = 0;
};

// Does the Communicator offer it so? all_reduce, broadcast and reduce are in place, all_to_all and sendrecv are not,
// all_gather and reduce_scatter are both.
bool is_offered(Operation operation, bool in_place);
bool is_reduction(Operation operation);

// Every rank makes the same trials and calls the same functions in the same order. Throws CommError as the
// communicator.
class Trial {
 public:
  Trial(comm::Communicator& ranks, const TrialOptions& options);

  // One call. On CUDA the current stream is ordered after it, else it has finished.
  void run();
  // Microseconds of a call on this rank, mean of `iterations` after `warmup` others.
  double time(int warmup, int iterations);
  // Fills the tensors, calls it once, and counts the elements of this rank that are not what they must be.
  int64_t count_wrong();

 private:
  void fill();
  at::Tensor expected() const;  // of result_; undefined where this rank gets nothing

  comm::Communicator& ranks_;
  TrialOptions options_;
  ExpectedValues values_;
  at::Tensor input_;
  at::Tensor result_;  // may be input_ or a part of it, or input_ a part of it
};

}  // namespace ds::tool::bench
