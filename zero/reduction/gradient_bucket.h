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

// Its transitions are those of Note [Life of a gradient bucket]; one that the note does not have is an InternalError,
// and one that throws leaves the state as it was, but for launch(). Not thread safe: used under the reducer's lock.
class GradientBucket {
 public:
  // All outlive it. `index`: the bucket's number, the same on every rank.
  GradientBucket(size_t index, const ParameterBucket& parameters, const GradientExchange& exchange,
                 BufferPool& buffers);

  size_t index() const { return index_; }
  BucketState state() const { return state_; }
  bool launched() const { return state_ == BucketState::kInFlight || state_ == BucketState::kReduced; }
  at::Device device() const { return parameters_->options().device(); }
  const std::vector<Parameter>& parameters() const { return parameters_->parameters(); }
  // Its number in the model, from its position in parameters().
  int64_t parameter_index(size_t position) const { return parameters_->layout().segments[position].parameter; }

  // No parameter has a gradient of this pass yet. Plain gradients: what .grad holds is reduced again.
  void begin_pass();
  // The parameter at `position` has one.
  bool has_arrived(size_t position) const { return arrived_[position] != 0; }
  // All parameters have one.
  bool all_arrived() const { return missing_ == 0; }
  // Was the parameter at `position` given none since reset()?
  bool without_gradient(size_t position) const { return !seen_[position]; }

  // Takes over the gradient of the parameter at `position`; shows it to `check` first, if there is one.
  void collect(size_t position, GradientCheck* check);
  // Begins the reduction; parameters without a gradient contribute zeros. Collective.
  void launch();
  // Waits for it. Throws CommError.
  void complete();
  const comm::Work& work() const { return transfer_.work; }
  // Of a reduction that may be late: whether the device has come to its launch.
  bool launch_reached() const { return launch_point_.reached(); }
  // Takes the reduced gradient out of the bucket, so that a new pass can fill it: to `elsewhere`, which takes this
  // bucket, or (null) to the sum on the device.
  void set_aside(ReducedGradients* elsewhere);
  // Of a reduced bucket: adds the sum on the device to the reduced gradient, which parameters' gradients are views of.
  void join_sum();
  // Of a reduced bucket of plain gradients: times `factor`, they become those of the parameters, but for those that
  // are not `used` (by number; empty: all are), which stay as they are. Afterwards none was given a gradient.
  void show(const std::vector<char>& used, double factor);
  // Drops those gradients of the parameters that are views of the bucket.
  void drop_parameter_gradients();
  // Drops all gradients. Waits for what is in flight.
  void reset();
  // Gives up the memory that reset() keeps.
  void release();

  // The reduced gradient on the device, whole at stage 0, else the own slice. Undefined where there is none.
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
  at::Tensor sum_;    // of earlier reductions: whole at stage 0, else the own slice
  at::Tensor slice_;  // memory of sum_ as a slice, kept from step to step
};

}  // namespace ds::zero
