// The exchange of one bucket between ranks, compressed with error feedback, for the optimizers of the 1-bit family.
//
// A slice may be the whole bucket (stage 0) or this rank's part of it (stages 1 and 2); parts of the compressed
// all-reduce and slices are the same then. Without peers nothing is compressed, and there are no errors.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>

#include "compression/compressed_all_reduce.h"
#include "dsengine/comm.h"
#include "optim/shard_optimizer.h"

namespace ds::compression {

class BucketExchange {
 public:
  // `slice`: this rank's slice of bucket `index`. `communicator`: all ranks that train the bucket. `scratch`: memory
  // that all buckets of an optimizer share, for averages of which this rank keeps a part; it grows to the largest
  // bucket. Both outlive the exchange.
  BucketExchange(const optimizers::Slice& slice, int64_t index, comm::Communicator& communicator, at::Tensor& scratch);

  // Moves `average`, this rank's slice of an average on which the ranks agree, by the gradients [bucket] of all ranks:
  // each rank computes average beta + gradient scale (1 - beta), and the compressed mean of these is the new average.
  // Collective.
  void exchange_average(const at::Tensor& average, const at::Tensor& gradient, double scale, double beta);
  // Replaces this rank's `values` [bucket] by the compressed mean that the ranks agree on. Collective.
  void exchange_values(const at::Tensor& values, const char* what);
  // Replaces this rank's gradient [bucket] by the mean over ranks, not compressed; returns the slice's part.
  // Collective.
  at::Tensor reduce_gradient(const at::Tensor& gradient) const;
  // Replaces `values` by the largest ones of all ranks. Collective.
  void take_largest(const at::Tensor& values, const char* what) const;

  // Holds averages at 0 in compressed exchanges where `mask` (bool, [bucket]) is false.
  void set_mask(const at::Tensor& mask);
  // Holds averages of elements with variance 0 at 0 from now on: they had no gradient yet, and a sign over eps would be
  // a step of any size. `variance`: of the slice. Collective the first time.
  void hold_without_variance(const at::Tensor& variance);
  // Makes the next hold_without_variance() look at the variance again, as it has changed.
  void variance_changed() { moving_known_ = false; }
  // The elements that move, bool [bucket]; undefined: all. To multiply with, in place of a fill, so that NaN stays
  // visible.
  const at::Tensor& moving() const { return moving_.defined() ? moving_ : mask_; }

  void forget_errors();
  // Adds the errors to `states`, as "worker_error.INDEX" and "server_error.INDEX".
  void add_errors(optimizers::NamedStates& states) const;
  // Follows SliceOptimizer::states_changed().
  void states_changed(bool rank_states);

 private:
  bool alone() const { return communicator_.size() == 1; }
  bool is_part() const { return slice_.exchange->size() > 1; }
  std::string label(const char* what) const;
  // The slice's part of a tensor of the bucket.
  at::Tensor own_part(const at::Tensor& bucket) const;
  // Returns the average of the whole bucket, in memory that may be overwritten.
  at::Tensor whole_average(const at::Tensor& average);
  void decode(const at::Tensor& agreed, const at::Tensor& bucket) const;

  optimizers::Slice slice_;
  int64_t index_;
  comm::Communicator& communicator_;
  at::Tensor& scratch_;
  std::unique_ptr<CompressedAllReduce> all_reduce_;
  at::Tensor worker_error_;  // [bucket], what the signs of this rank have not said yet
  at::Tensor server_error_;  // [own part]
  at::Tensor agreed_;        // bytes of the last result, where the slice is a part of it; undefined: unknown
  at::Tensor mask_;          // bool [bucket], given by the program: elements that may move; undefined: all
  at::Tensor moving_;        // bool [bucket], elements that have a variance and may move; undefined: all
  bool moving_known_ = false;
};

}  // namespace ds::compression
