// One bucket of gradients, from the first gradient of a pass to the reduced one that the update reads.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/device/stream_point.h"
#include "core/slices/reduced_gradients.h"
#include "zero/buffer_pool.h"
#include "zero/parameter_bucket.h"
#include "zero/reduction/gradient_check.h"
#include "zero/reduction/gradient_exchange.h"
#include "zero/reduction/reduction_states.h"

namespace ds::zero {

// The buffer, the state and the sum of one bucket. Its transitions are those of Note [Life of a gradient bucket]; one
// that the note does not have is an InternalError, and one that throws leaves the state as it was, but for launch().
// Not thread safe: used under the reducer's lock.
class GradientBucket {
 public:
  // All arguments outlive it. `index`: the bucket's number, the same on every rank.
  GradientBucket(size_t index, const ParameterBucket& parameters, const GradientExchange& exchange,
                 BufferPool& buffers);

  size_t index() const { return index_; }
  BucketState state() const { return state_; }
  bool launched() const { return state_ == BucketState::kInFlight || state_ == BucketState::kReduced; }
  at::Device device() const { return parameters_->options().device(); }
  const std::vector<Parameter>& parameters() const { return parameters_->parameters(); }
  // A parameter's number in the model, from its position in parameters().
  int64_t parameter_index(size_t position) const { return parameters_->layout().segments[position].parameter; }

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
  const comm::Work& work() const { return transfer_.work; }
  // Whether the device has come to the launch of the reduction, from where the time of one that may be late counts.
  bool launch_reached() const { return launch_point_.reached(); }
  // Takes the reduced gradient out of the bucket, so that a new pass can fill it: to `elsewhere`, which takes this
  // bucket, or (null) to the sum on the device.
  void set_aside(ReducedGradients* elsewhere);
  // Adds the sum on the device to the reduced gradient of a reduced bucket; parameters' gradients are views of that.
  void join_sum();
  // Multiplies the plain gradients of a reduced bucket by `factor` and makes them those of the parameters. Parameters
  // that are not `used` (by number; empty: all are) keep what they have. Afterwards none counts as given a gradient.
  void show(const std::vector<char>& used, double factor);
  // Drops those gradients of the parameters that are views of the bucket.
  void drop_parameter_gradients();
  // Drops all gradients. Waits for what is in flight.
  void reset();
  // Gives up the memory that reset() keeps.
  void release();

  // The reduced gradient on the device: of the full bucket at stage 0, else of this rank's slice. Undefined where there
  // is none.
  at::Tensor gradient() const;
  bool has_sum() const { return sum_.defined(); }

 private:
  void open();
  void zero_padding();
  void fill_missing();
  void fill_from_parameter(size_t position);
  void empty();
  void drop_sum();
  at::Tensor kept_slice(const at::Tensor& own);
  bool transient() const { return exchange_->options().transient(); }
  bool plain() const { return exchange_->options().plain_gradients(); }

  size_t index_;
  const ParameterBucket* parameters_;
  const GradientExchange* exchange_;
  BufferPool* buffers_;
  BucketState state_ = BucketState::kEmpty;
  at::Tensor local_;           // [numel] gradient dtype
  std::vector<char> filled_;   // per parameter: local_ holds a gradient
  std::vector<char> seen_;     // per parameter: had a gradient since reset()
  std::vector<char> arrived_;  // per parameter: had a gradient in this pass
  size_t missing_ = 0;         // parameters that had none in this pass
  GradientTransfer transfer_;
  StreamPoint launch_point_;
  at::Tensor sum_;    // the sum of earlier reductions: full at stage 0, else this rank's slice
  at::Tensor slice_;  // memory of sum_ as a slice, kept from step to step
};

}  // namespace ds::zero
