// The base of the optimizers of the 1-bit family: for each bucket a compressed exchange with its errors.
//
// In a compressed step update() takes this rank's own gradient of the whole bucket (wants_local_gradients()), so whole
// gradients and one error of the length of a bucket stay on every rank, whatever the stage.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "compression/bucket_exchange.h"
#include "dsengine/comm.h"
#include "optim/shard_optimizer.h"

namespace ds::compression {

class CompressedOptimizer : public optimizers::CopyingOptimizer {
 public:
  // Collective in compressed steps.
  void update_into(int64_t index, const at::Tensor& gradient, double gradient_scale, const at::Tensor& copy) final;
  bool wants_local_gradients() const override { return is_local(step_count_ + 1); }
  optimizers::NamedStates rank_states() override;
  void states_changed(bool rank_states) override;
  // Holds averages of a slice's whole bucket at 0 in compressed steps where `mask` (bool, [bucket]) is false:
  // DeepSpeed's exp_avg_mask. 1 bit has no zero.
  void set_average_mask(int64_t index, const at::Tensor& mask);

 protected:
  // `communicator`: all ranks that train the same bucket; outlives the optimizer.
  CompressedOptimizer(std::vector<optimizers::GroupOptions> groups, comm::Communicator& communicator);

  // Whether step `step`, from 1, takes local gradients.
  virtual bool is_local(int64_t step) const = 0;
  // Makes one update. `gradient` is what is_local() asked for.
  virtual void advance(int64_t index, const at::Tensor& gradient, double gradient_scale, const at::Tensor& copy) = 0;
  // Makes the states of the slice beside its exchange's.
  virtual void allocate_slice_states(int64_t index, const optimizers::NewState& new_state) = 0;

  BucketExchange& exchange(int64_t index) { return exchanges_[static_cast<size_t>(index)]; }

 private:
  void allocate_states(int64_t index, const optimizers::NewState& new_state) final;

  comm::Communicator& communicator_;
  at::Tensor scratch_;  // which the exchanges share
  std::vector<BucketExchange> exchanges_;
};

// Throws ConfigError where no step comes before the freeze that moves the variance.
void require_freeze_step(int64_t freeze_step, bool deepspeed_semantics);

}  // namespace ds::compression
