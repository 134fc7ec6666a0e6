// How one bucket of gradients is reduced between ranks: the groups, what travels, what it is divided by, where the
// result is kept.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>

#include "core/device/stream_point.h"
#include "core/slices/reduced_gradients.h"
#include "dsengine/comm.h"
#include "zero/reduction/reducer_options.h"

namespace ds::zero {

// One reduction under way.
struct GradientTransfer {
  comm::Work work;
  // The tensor that the collective runs on: `local`, or a copy of another dtype. Undefined: nothing is sent.
  at::Tensor wire;
  // The launch in the order of the device's work, for transient buckets: the time of a reduction that may be late
  // counts from there (LateReductions).
  StreamPoint launch_point;
};

// What gradients are divided by before they are added over ranks, and what their sum is divided by.
struct Divisors {
  double before = 1;
  double after = 1;
};

// Reduces buckets of gradients between ranks. Not thread safe: used under the reducer's lock, which also keeps
// collectives in order. Throws CommError.
class GradientExchange {
 public:
  // The groups of `routes` outlive it.
  GradientExchange(const ReduceRoutes& routes, const ReducerOptions& options) : routes_(routes), options_(options) {}

  const ReducerOptions& options() const { return options_; }
  // The ranks with which a bucket is reduced: every launch reduces over `shards`, and the boundary of an accumulation
  // once over `replicas`. An average is one over the ranks of both. All code that reduces asks here, since the buckets
  // of one model may be reduced in different ways.
  BucketGroups groups_of(size_t bucket) const;
  // The reduction that replaces the collective over `shards` for a bucket; null: none does.
  comm::BucketReduction* replacement_of(size_t bucket) const;
  // The place that keeps the reduced gradient of a bucket; null: it stays on the device, beside its bucket.
  ReducedGradients* elsewhere_of(size_t bucket) const;
  // While true, gradients stay those of this rank, whole buckets, and nothing is sent.
  void keep_local(bool local) { local_ = local; }
  bool keeps_local() const { return local_; }

  // What makes a mean of a sum over the ranks that share a bucket; 1 and 1 where sums are wanted.
  Divisors divisors(size_t bucket) const;
  // The part of `flat` (the bucket, [numel]) that this rank has after a reduction.
  at::Tensor own_part(size_t bucket, const at::Tensor& flat) const;
  // Whether reductions under way hold copies, whose number is to be bounded where buckets stay.
  bool makes_copies() const;
  // Begins the reduction of `local`, [numel]. `transfer` has what the collective uses even where this throws.
  void start(size_t bucket, const at::Tensor& local, GradientTransfer& transfer) const;
  // Waits for the reduction; afterwards this rank's part of `local` is the reduced gradient.
  void finish(size_t bucket, const at::Tensor& local, GradientTransfer& transfer) const;

 private:
  bool divides_in_two() const { return options_.average && !options_.prescale && options_.predivide_factor != 1.0; }
  // NCCL multiplies before an average, and does without its fastest ways: switches that add (NVLS), and reduce_scatter
  // as a tree (PAT). A sum of float16 may be too large.
  bool divides_after(size_t bucket, const at::Tensor& wire) const {
    return options_.average && !options_.prescale && !divides_in_two() && !wire.is_cpu() &&
           wire.scalar_type() != at::kHalf && !replacement_of(bucket);
  }

  ReduceRoutes routes_;
  ReducerOptions options_;
  bool local_ = false;
};

}  // namespace ds::zero
