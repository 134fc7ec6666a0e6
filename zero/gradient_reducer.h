// Collects gradients in buckets and reduces each bucket while backward is still running.
//
// What c10d's Reducer is to DDP, for every ZeRO stage up to 2: a stage is only a policy on buckets. A hook on every
// parameter hands its gradient over as soon as autograd has made it; the last gradient of a bucket starts that bucket's
// collective. Buckets are always reduced in the same order (the last bucket of the model first), whatever order or
// subset of gradients a rank produces, so nothing can wait for a parameter that got none: it contributes zeros.
//
// Gradients add up: over the micro-batches of an accumulation, over several backward passes in one micro-batch, and
// over passes that were reduced and passes that were not.
//
// Threads: begin_backward, end_backward, finish and reset belong to the engine's thread; the hooks may run on
// autograd's device threads and take a lock.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "comm/bucket_reduction.h"
#include "core/reduced_gradients.h"
#include "dsengine/comm.h"
#include "dsengine/memory.h"
#include "zero/gradient_check.h"
#include "zero/parameter_bucket.h"

namespace ds::zero {

struct ReducerOptions {
  ReductionPolicy policy = ReductionPolicy::kAllReduce;
  bool overlap = true;            // start collectives inside backward; off: all after it, in the same order
  bool average = true;            // divide by the number of ranks ("gradient_allreduce_op": "mean")
  bool prescale = false;          // divide before the collective instead of after
  double predivide_factor = 1.0;  // f: times 1/f before, f/W after
  at::ScalarType gradient_dtype = at::kFloat;  // of buckets and accumulated slices
  at::ScalarType communication_dtype = at::kFloat;
  // Stage 3: how long a gradient's hook may wait for other ranks at first, also on a device, where a gather behind a
  // reduction that waits would never begin. One that waits for this rank's next gather cannot reduce, where it has no
  // gradient for a parameter that has one here; the buckets that would be given back stay then.
  std::optional<std::chrono::milliseconds> patience;
  // Where buckets stay until finish(): reduced gradients that leave them all the same leave inside backward.
  bool leave_in_backward = false;
};

// Where reduced gradients go.
struct ReduceRoutes {
  comm::Communicator& slices;  // its ranks own the slices of a bucket
  // Ranks that own equal slices in other such groups (MiCS, Zhang et al., arXiv:2205.00119, section 3.3: their sums are
  // joined once, at the boundary of an accumulation); null where `slices` is all there is.
  comm::Communicator* replicas = nullptr;
  // Over the ranks of `slices`: compresses gradients, in place of their all-reduce or reduce-scatter; null: they are
  // sent as they are.
  comm::BucketReduction* reduction = nullptr;
  // Keeps the reduced slices of the buckets it takes, which a step then reads there; null: all stay on the device.
  // With it, gradients leave their buckets one by one also where one rank owns all slices.
  ReducedGradients* elsewhere = nullptr;
};

class GradientReducer {
 public:
  // `buckets`, `parameters` and the groups outlive the reducer. Installs a hook on every parameter and drops
  // gradients it has. Throws UsageError for a parameter that has a hook of another reducer.
  GradientReducer(const std::vector<ParameterBucket>& buckets, const std::vector<Parameter>& parameters,
                  ReduceRoutes routes, ReducerOptions options);
  ~GradientReducer();
  GradientReducer(const GradientReducer&) = delete;
  GradientReducer& operator=(const GradientReducer&) = delete;

  // From now on gradients stay those of this rank, whole buckets, and nothing is sent; or are reduced again. For
  // optimizers that exchange something else than gradients. Between steps: no gradient may be held. With the policy
  // kReduceScatterEveryBackward, and with gradients elsewhere, it throws UsageError.
  void keep_local(bool local);
  bool keeps_local() const { return local_; }
  // Shows it each gradient that autograd makes from now on, before it is added to others. It outlives the reducer.
  void check_with(GradientCheck& check) { check_ = &check; }
  // Around every backward pass. `synchronize`: this pass ends in a reduction if the policy asks for one at `boundary`.
  // `in_pass`, of each bucket: whether the pass may give it gradients, the same on all ranks; where the policy reduces
  // in every pass, the others are left alone. Empty: all. Throws UsageError while a pass runs, and after one that
  // failed until reset().
  void begin_backward(bool synchronize, bool boundary, std::vector<char> in_pass = {});
  void end_backward();
  // In place of end_backward() when the pass threw: what it left can only be dropped.
  void abandon_backward();
  bool failed() const { return abandoned_; }  // did the last pass throw?

  // Reduces what is still local (passes under no_sync, a boundary that was declared late) and waits for everything.
  void finish();
  // After finish(): the reduced gradient of a bucket, whole at stage 0, else the own slice. Undefined before any
  // backward.
  at::Tensor gradient(size_t bucket) const;
  // Drops all gradients, reduced or not.
  void reset();
  // Gives up the memory that is kept from step to step. Between steps: all gradients are dropped.
  void release_buffers();
  // Parameters that took part in no backward since the last reset.
  std::vector<int64_t> parameters_without_gradient() const;
  // Largest number of bytes held in gradient tensors since the last call.
  int64_t take_peak_bytes();

 private:
  struct Bucket;
  class Hook;

  void on_gradient(size_t bucket, size_t position);
  void store_gradient(Bucket& bucket, size_t position);
  void open_local(Bucket& bucket);
  void zero_padding(Bucket& bucket);
  void set_aside_reduced(Bucket& bucket);
  void launch_ready(bool all);
  void launch(Bucket& bucket);
  void complete(Bucket& bucket);
  void join_replicas();
  void limit_in_flight(size_t allowed, bool inside_backward = false);
  bool ready_in_time(const Bucket& bucket);
  void limit_wires(size_t allowed);
  void fill_missing(Bucket& bucket);
  at::Tensor kept_slice(Bucket& bucket, const at::Tensor& own);
  void move_elsewhere(Bucket& bucket);
  void leave_in_order(size_t staying);
  bool is_elsewhere(const Bucket& bucket) const;
  size_t index_of(const Bucket& bucket) const;
  void drop_reduced(Bucket& bucket);
  at::Tensor take_buffer(const Bucket& bucket);
  void give_back(at::Tensor buffer);
  at::Tensor own_part(const Bucket& bucket, const at::Tensor& flat) const;
  bool leaves_in_backward() const { return elsewhere_ && options_.leave_in_backward; }
  bool is_in_pass(size_t bucket) const { return in_pass_.empty() || in_pass_[bucket]; }
  bool transient() const { return options_.policy == ReductionPolicy::kReduceScatterEveryBackward; }
  void note_bytes(int64_t change);

  const std::vector<Parameter>& parameters_;
  comm::Communicator& communicator_;  // of slices
  comm::Communicator* replicas_;
  comm::BucketReduction* reduction_;
  ReducedGradients* elsewhere_;
  GradientCheck* check_ = nullptr;
  ReducerOptions options_;
  std::vector<Bucket> buckets_;
  std::vector<at::Tensor> pool_;   // free transient buffers, stage 2
  std::vector<size_t> in_flight_;  // buckets with a collective under way, oldest first
  size_t next_ = 0;                // buckets_[size - 1 - next_] is the next to be launched in this backward
  std::vector<char> in_pass_;      // of each bucket; empty: all
  bool in_backward_ = false;
  bool reduce_in_this_backward_ = false;
  bool unreduced_ = false;  // the last backward was not reduced
  bool joined_ = false;     // replicas have joined the gradients
  bool local_ = false;      // keep_local()
  int late_passes_ = 0;     // backward passes in which a reduction was late
  bool late_in_this_backward_ = false;
  bool abandoned_ = false;  // the last backward threw
  int64_t bytes_ = 0;
  int64_t peak_bytes_ = 0;
  std::mutex mutex_;
};

}  // namespace ds::zero
