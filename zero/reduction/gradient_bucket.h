// One bucket of gradients, from the first gradient of a pass to the reduced one that the update reads.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <optional>
#include <vector>

#include "zero/buffer_pool.h"
#include "zero/parameter_bucket.h"
#include "zero/reduction/gradient_check.h"
#include "zero/reduction/gradient_exchange.h"
#include "zero/reduction/gradient_memory.h"
#include "zero/reduction/reduction_states.h"
#include "zero/reduction/row_gradient.h"

namespace ds::zero {

// The state of one bucket, its buffer, its reduction and its sum. Its transitions are those of Note [Life of a gradient
// bucket]; one that the note does not have is an InternalError, and one that throws leaves the state as it was, but for
// launch(). Not thread safe: used under the reducer's lock.
//
// The gradient of a row-wise table (BucketLayout::row_width) goes through the same states as rows, without a buffer.
class GradientBucket {
 public:
  // All arguments outlive it. `index`: the bucket's number, the same on every rank.
  GradientBucket(size_t index, const ParameterBucket& parameters, const GradientExchange& exchange,
                 BufferPool& buffers);

  size_t index() const { return index_; }
  BucketState state() const { return state_; }
  bool launched() const { return state_ == BucketState::kInFlight || state_ == BucketState::kReduced; }
  // The parameters whose gradients it collects, and their layout.
  const ParameterBucket& parameters() const { return *parameters_; }

  // Begins a pass: no parameter has a gradient of it yet. With plain gradients, what .grad holds is reduced again.
  void begin_pass();
  // Whether the parameter at `position` has a gradient of this pass.
  bool has_arrived(size_t position) const { return arrived_[position] != 0; }
  // Whether all parameters have one.
  bool all_arrived() const { return missing_ == 0; }
  // Whether the parameter at `position` was given no gradient since reset().
  bool without_gradient(size_t position) const { return !seen_[position]; }

  // Takes over the gradient of the parameter at `position`; shows it to `check` first, if there is one.
  void collect(size_t position, GradientCheck* check);
  // Begins the reduction; parameters without a gradient contribute zeros. Collective.
  void launch();
  // Waits for the reduction. Throws CommError.
  void complete();
  // The reduction under way.
  const GradientTransfer& transfer() const { return transfer_; }
  // Takes the reduced gradient out of the bucket, so that a new pass can fill it: to the place elsewhere that takes
  // this bucket (GradientExchange::elsewhere_of), else to the sum on the device.
  void set_aside();
  // Adds the sum on the device to the reduced gradient of a reduced bucket; parameters' gradients are views of that.
  void join_sum();
  // Multiplies the plain gradients of a reduced bucket by `factor` and makes them those of the parameters. Parameters
  // that are not `used` (by number; empty: all are) keep what they have. Afterwards none counts as given a gradient.
  void show(const std::vector<char>& used, double factor);
  // Drops those gradients of the parameters that are views of the bucket.
  void drop_parameter_gradients() { buffer_.drop_parameter_gradients(); }
  // Drops all gradients. Waits for what is in flight.
  void reset();
  // Gives up the memory that reset() keeps.
  void release();

  // The reduced gradient, from where it is kept: of the full bucket at stage 0, else of this rank's slice. Undefined
  // where there is none. Of a row-wise table, as a coalesced sparse tensor, all rows that have one, on every rank; of a
  // sharded one those of this rank's slice.
  at::Tensor gradient() const;
  // Whether the sum on the device holds a gradient.
  bool has_sum() const { return rows_ ? rows_->has_sum() : sum_.tensor().defined(); }

 private:
  size_t index_;
  const ParameterBucket* parameters_;
  const GradientExchange* exchange_;
  BucketState state_ = BucketState::kEmpty;
  GradientBuffer buffer_;      // `local` of the note
  std::vector<char> seen_;     // per parameter: had a gradient since reset()
  std::vector<char> arrived_;  // per parameter: had a gradient in this pass
  size_t missing_ = 0;         // parameters that had none in this pass
  GradientTransfer transfer_;
  ReducedSum sum_;
  std::optional<RowGradient> rows_;  // of a row-wise table, in the place of buffer, transfer and sum
};

}  // namespace ds::zero
