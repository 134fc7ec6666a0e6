// What a GradientReducer is told: how to reduce, with whom, and where the results go.
#pragma once

#include <c10/core/ScalarType.h>

#include <chrono>
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "comm/bucket_reduction.h"
#include "core/slices/reduced_gradients.h"
#include "dsengine/comm.h"
#include "dsengine/memory.h"

namespace ds::zero {

struct ReducerOptions {
  ReductionPolicy policy = ReductionPolicy::kAllReduce;
  bool overlap = true;            // start collectives inside backward; off: all after it, in the same order
  bool average = true;            // divide by the number of ranks ("gradient_allreduce_op": "mean")
  bool prescale = false;          // divide before the collective instead of after
  double predivide_factor = 1.0;  // f: times 1/f before, f/W after
  // Of buckets and accumulated slices, and of what travels. Undefined: that of the bucket's parameters.
  at::ScalarType gradient_dtype = at::kFloat;
  at::ScalarType communication_dtype = at::kFloat;
  // Of what travels of each bucket; Undefined: communication_dtype. Empty: that of all. Not of what a BucketReduction
  // takes.
  std::vector<at::ScalarType> bucket_dtypes;
  // Stage 3: how long a gradient's hook may wait for other ranks at first, also on a device, where a gather behind a
  // reduction that waits would never begin. One that waits for this rank's next gather cannot reduce, where it has no
  // gradient for a parameter that has one here; the buckets that would be given back stay then.
  std::optional<std::chrono::milliseconds> patience;
  // Where buckets stay until finish(): reduced gradients that leave them all the same leave inside backward.
  bool leave_in_backward = false;
  std::string model = "the model";  // what messages call it
  // Backward passes are the program's own (loss.backward()). Who is named by GradientReducer::enter_with() begins one
  // in its first hook; passes of engines on this thread are none of its business, nor its own theirs.
  bool plain_passes = false;
  // With plain passes and kAllReduce: .grad is torch's. What it holds at the end of a pass, of earlier passes too, is
  // reduced, and the result is written there. True: as a view of the bucket, which saves the memory; else to its own.
  bool gradients_are_views = true;

  at::ScalarType dtype_sent(size_t bucket) const {
    const bool own = bucket < bucket_dtypes.size() && bucket_dtypes[bucket] != at::ScalarType::Undefined;
    return own ? bucket_dtypes[bucket] : communication_dtype;
  }
  // Does every pass reduce, and give its buckets back?
  bool transient() const { return policy == ReductionPolicy::kReduceScatterEveryBackward; }
  // Are gradients the program's, in .grad, and buckets only how they travel?
  bool plain_gradients() const { return plain_passes && policy == ReductionPolicy::kAllReduce; }
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

}  // namespace ds::zero
