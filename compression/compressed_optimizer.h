// What the optimizers of the 1-bit family share: for each bucket a compressed all-reduce and its errors.
//
// A slice may be the whole bucket (stage 0) or this rank's part of it (stages 1 and 2); parts and slices are the same
// then. In a compressed step update() takes this rank's own gradient of the whole bucket (wants_local_gradients()), so
// whole gradients and one error of the length of a bucket stay on every rank, whatever the stage.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "compression/compressed_all_reduce.h"
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
  bool uses_betas() const override { return true; }
  // Elements of a slice's whole bucket whose average is held at 0 in compressed steps where mask (bool, [bucket]) is
  // false: DeepSpeed's exp_avg_mask. 1 bit has no zero.
  void set_average_mask(int64_t index, const at::Tensor& mask);

 protected:
  // What one bucket exchanges. Without peers nothing is compressed, and all of it is empty.
  struct Exchange {
    std::unique_ptr<CompressedAllReduce> all_reduce;
    at::Tensor worker_error;  // [bucket], what the signs of this rank have not said yet
    at::Tensor server_error;  // [own part]
    at::Tensor agreed;        // bytes of the last result, where the slice is a part of it; undefined: unknown
    at::Tensor mask;          // bool [bucket], given by the program: elements that may move; undefined: all
    at::Tensor moving;        // bool [bucket], elements that move; undefined: all
    bool moving_known = false;
  };

  // `communicator`: all ranks that train the same bucket; outlives the optimizer.
  CompressedOptimizer(std::vector<optimizers::GroupOptions> groups, comm::Communicator& communicator);

  // Whether step `step`, from 1, takes local gradients.
  virtual bool is_local(int64_t step) const = 0;
  // Throws ConfigError where no step comes before the freeze that moves the variance.
  static void require_freeze_step(int64_t freeze_step, bool deepspeed_semantics);

  // One update. `gradient` is what is_local() asked for.
  virtual void advance(int64_t index, const at::Tensor& gradient, double gradient_scale, const at::Tensor& copy) = 0;
  // States of the slice beside its Exchange.
  virtual void allocate_slice_states(int64_t index) = 0;

  comm::Communicator& communicator() const { return communicator_; }
  bool alone() const { return communicator_.size() == 1; }
  Exchange& exchange(int64_t index) { return exchanges_[static_cast<size_t>(index)]; }
  // The slice's part of a tensor of the bucket.
  at::Tensor own_part(int64_t index, const at::Tensor& bucket) const;
  std::string label(const char* what, int64_t index) const;

  // From now on averages of elements with variance 0 are held at 0: they had no gradient yet, and a sign over eps would
  // be a step of any size. variance: of the slice. Collective the first time.
  void hold_without_variance(int64_t index, const at::Tensor& variance);
  // The variances changed: who is held is to be seen again.
  void variance_changed(int64_t index) { exchange(index).moving_known = false; }
  // average [slice], the same for all elements of the bucket on all ranks together, becomes what the ranks agree on
  // after each has moved it by its own gradient: average beta + gradient scale (1 - beta), compressed. Collective.
  void exchange_average(int64_t index, const at::Tensor& average, const at::Tensor& gradient, double scale,
                        double beta);
  // The mean over ranks of a local gradient of the bucket, not compressed, in `gradient`; returns the slice's part.
  at::Tensor reduced(int64_t index, const at::Tensor& gradient) const;
  // values [bucket] of this rank become what the ranks agree on. Collective.
  void exchange_values(int64_t index, const at::Tensor& values, const char* what);
  void forget_errors(int64_t index);
  // bool [bucket]: elements that move; undefined: all.
  at::Tensor moving(int64_t index) { return moving_of(exchange(index)); }

 private:
  void allocate_states(int64_t index) final;
  at::Tensor whole_average(int64_t index, const at::Tensor& average);
  static const at::Tensor& moving_of(const Exchange& exchange);
  void decode(int64_t index, const at::Tensor& agreed, const at::Tensor& bucket);
  bool is_part(int64_t index) const { return slice(index).exchange->size() > 1; }

  comm::Communicator& communicator_;
  std::vector<Exchange> exchanges_;
  at::Tensor scratch_;  // [largest bucket], for averages of which this rank keeps a part
};

}  // namespace ds::compression
