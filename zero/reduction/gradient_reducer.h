// Collects gradients in buckets and reduces each bucket while backward is still running.
//
// It does for every ZeRO stage what c10d's Reducer does for DDP: a stage only chooses when buckets are reduced
// (ReductionPolicy). A hook on every parameter hands its gradient over as soon as autograd has made it; a bucket's
// collective starts when all its gradients are there and every bucket before it has started. The order is fixed, the
// last bucket of the model first. The end of the pass starts the rest, with zeros for missing gradients, so that no
// rank waits for a parameter that got none.
//
// Gradients add up: over the micro-batches of an accumulation, over several backward passes in one micro-batch, and
// over passes that were reduced and passes that were not. The states of a bucket and of a pass, and their transitions:
// Note [Life of a gradient bucket] (zero/reduction/reduction_states.h).
//
// Plain gradients (ReducerOptions::plain_gradients()): the program calls loss.backward() itself, and .grad belongs to
// it, as in torch. Several engines on one thread: zero/reduction/neighbour_passes.h.
//
// The dtypes of gradients, and whether they are added or averaged: ReducerOptions (zero/reduction/reducer_options.h).
//
// Threads: all methods belong to the engine's thread; the hooks may run on autograd's device threads and take a lock.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include "core/slices/reduced_gradients.h"
#include "zero/buffer_pool.h"
#include "zero/parameter_bucket.h"
#include "zero/reduction/gradient_bucket.h"
#include "zero/reduction/gradient_check.h"
#include "zero/reduction/gradient_exchange.h"
#include "zero/reduction/neighbour_passes.h"
#include "zero/reduction/reducer_options.h"
#include "zero/reduction/reduction_queue.h"
#include "zero/reduction/reduction_states.h"

namespace ds::zero {

// Collects and reduces the gradients of the trainable buckets; see the top of this file.
class GradientReducer {
 public:
  // `buckets`, `parameters` and the groups outlive the reducer. Installs a hook on every parameter, which the
  // destructor removes, and drops the gradients that parameters already have, unless they are plain. No parameter may
  // have a hook of another reducer; collect_parameters() (model/) checks that.
  GradientReducer(const std::vector<ParameterBucket>& buckets, const std::vector<Parameter>& parameters,
                  ReduceRoutes routes, const ReducerOptions& options);
  ~GradientReducer();
  GradientReducer(const GradientReducer&) = delete;
  GradientReducer& operator=(const GradientReducer&) = delete;

  // True: nothing is sent from now on, and gradient() is this rank's own gradient of the full bucket, for optimizers
  // that exchange something else than gradients. False: buckets are reduced again. To be called between steps, while no
  // gradient is held. A change throws UsageError while a bucket's reduction is under way or its result is kept, with
  // the policy kReduceScatterEveryBackward, with replicas (ReduceRoutes::replicas), and where reduced gradients are
  // kept in host memory (ReduceRoutes::elsewhere).
  void keep_local(bool local);
  bool keeps_local() const { return exchange_.keeps_local(); }
  // Shows `check` each gradient that autograd makes from now on, before it is added to others. `check` outlives the
  // reducer.
  void check_with(GradientCheck& check) { check_ = &check; }
  // For plain passes, in which the program calls loss.backward() itself (ReducerOptions::plain_passes). `enter` is
  // called at the start of every hook, from several autograd threads at once. It must call begin_backward() for the
  // pass if nobody has, and arrange that end_backward() follows.
  void enter_with(std::function<void()> enter) { enter_ = std::move(enter); }
  // Begin and end every backward pass. `synchronize`: false under no_sync; the pass then reduces nothing. `boundary`:
  // this is the last micro-batch of an accumulation; only kReduceScatterEveryBackward reduces before it. `in_pass` says
  // for each bucket whether the pass may give it gradients, the same on all ranks; empty: all may. Where every pass
  // reduces, a bucket outside of `in_pass` is not reduced, unless an earlier pass was not reduced. begin_backward()
  // throws UsageError while a pass runs, after a failed pass and after finish() with replicas until reset(), and while
  // gradients of another engine's pass are left. With plain gradients a pass may follow a failed one at once; .grad
  // then holds what the failed pass left.
  void begin_backward(bool synchronize, bool boundary, std::vector<char> in_pass = {});
  void end_backward();
  // Makes the next pass start no reduction before it ends: passes of several engines run at once, and the bucket that
  // is complete first may be another engine's on another rank.
  void reduce_after_next_pass() { waits_for_end_ = true; }
  // Ends a pass that threw, in place of end_backward(). Its gradients can only be dropped, by reset(). Plain gradients
  // that are views of a bucket whose reduction is under way are dropped here.
  void abandon_backward();
  bool failed() const { return state_ == PassState::kFailed; }  // whether the last pass threw

  // Reduces gradients that are still local (passes under no_sync, a boundary that was declared late), waits for every
  // reduction, and adds up the replicas (ReduceRoutes::replicas), after which no pass can add to them until reset().
  // Collective. Throws UsageError while a pass runs, after one that failed, and while gradients of another engine's
  // pass are left; CommError where a reduction has failed.
  void finish();
  // For plain gradients: multiplies the reduced gradients by `factor` and puts them into .grad of the `used` parameters
  // (by number; empty: all). To be called after finish().
  void show_gradients(const std::vector<char>& used, double factor);
  // Whether any parameter has received more than one gradient in one backward pass since construction. Reentrant
  // activation checkpointing does this; such a gradient is complete only at the end of the pass.
  bool any_repeated() const { return any_repeated_; }
  // Returns the reduced gradient of a bucket after finish(), a flat tensor in ReducerOptions::gradient_dtype that the
  // reducer keeps: of the full bucket at stage 0, else of this rank's slice; with keep_local(true) this rank's own
  // gradient of the full bucket. For a row-wise table (BucketLayout::row_width) it is a coalesced sparse tensor of all
  // rows that have a gradient, on every rank, or of those of this rank's slice where the table is sharded. Undefined
  // before any backward.
  at::Tensor gradient(size_t bucket) const;
  // Drops all gradients, reduced or not. Not to be called while a pass runs.
  void reset();
  // Drops all gradients and gives up the memory that is kept from step to step. To be called between steps.
  void release_buffers();
  // The passes of other engines on the thread, whose gradients the program has to drop.
  NeighbourPasses& neighbours() { return neighbours_; }
  // Returns the numbers of the parameters that got no gradient on this rank since the last reset() or show_gradients().
  std::vector<int64_t> parameters_without_gradient() const;
  // Returns the most bytes of bucket memory since the last call, free buffers included. Gradients that are kept
  // elsewhere do not count.
  int64_t take_peak_bytes();

 private:
  class Hook;

  void on_gradient(size_t index, size_t position);
  void drop_all();

  const std::vector<Parameter>& parameters_;
  GradientExchange exchange_;
  ReducedGradients* elsewhere_;
  GradientCheck* check_ = nullptr;
  BufferPool buffers_;
  std::vector<GradientBucket> buckets_;
  ReductionQueue queue_;
  NeighbourPasses neighbours_;
  PassState state_ = PassState::kIdle;
  std::function<void()> enter_;
  bool any_repeated_ = false;
  bool waits_for_end_ = false;  // the running pass, or the next one
  std::mutex mutex_;
};

}  // namespace ds::zero
