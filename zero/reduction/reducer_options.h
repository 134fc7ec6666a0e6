// The options of a GradientReducer: how to reduce, with which ranks, and where the results go.
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

// How gradients are reduced.
struct ReducerOptions {
  ReductionPolicy policy = ReductionPolicy::kAllReduce;
  bool overlap = true;            // start collectives inside backward; off: all after it, in the same order
  bool average = true;            // divide by the number of ranks ("gradient_allreduce_op": "mean")
  bool prescale = false;          // divide before the collective instead of after
  double predivide_factor = 1.0;  // f: times 1/f before, f/W after
  // The dtype of buckets and accumulated slices, and the dtype in which gradients are sent. Undefined: that of the
  // bucket's parameters.
  at::ScalarType gradient_dtype = at::kFloat;
  at::ScalarType communication_dtype = at::kFloat;
  // For each bucket the dtype in which its gradients are sent; Undefined: communication_dtype. Empty: all buckets use
  // that. Buckets that a BucketReduction takes always do.
  std::vector<at::ScalarType> bucket_dtypes;
  // Stage 3: how long a gradient's hook may wait for other ranks at first, also on a device, where a gather behind a
  // reduction that waits would never begin. A rank that waits for this one's next gather cannot reduce, where it has no
  // gradient for a parameter that has one here; buckets that would be given back are then kept. Nothing: a hook waits
  // as long as it takes. See Note [Hooks that wait at stage 3].
  std::optional<std::chrono::milliseconds> patience;
  // Where buckets keep their memory until finish(): reduced gradients that go elsewhere (ReduceRoutes::elsewhere) do so
  // inside backward.
  bool leave_in_backward = false;
  std::string model = "the model";  // its name in messages
  // "Plain" passes are the program's own (loss.backward()). The function given to GradientReducer::enter_with() begins
  // one in its first hook; passes of engines on this thread do not concern this reducer, nor its passes them.
  bool plain_passes = false;
  // With plain passes and kAllReduce, .grad is torch's: what it holds at the end of a pass, of earlier passes too, is
  // reduced, and the result is written there. True: .grad becomes a view of the bucket, which saves memory; false: it
  // keeps memory of its own.
  bool gradients_are_views = true;

  at::ScalarType dtype_sent(size_t bucket) const {
    const bool own = bucket < bucket_dtypes.size() && bucket_dtypes[bucket] != at::ScalarType::Undefined;
    return own ? bucket_dtypes[bucket] : communication_dtype;
  }
  // Whether every pass reduces, and gives the memory of its buckets back.
  bool transient() const { return policy == ReductionPolicy::kReduceScatterEveryBackward; }
  // Whether gradients are the program's, in .grad, and buckets only how they are sent.
  bool plain_gradients() const { return plain_passes && policy == ReductionPolicy::kAllReduce; }
};

// The ranks that share a bucket.
struct BucketGroups {
  comm::Communicator& shards;    // each rank owns a slice of the bucket
  comm::Communicator* replicas;  // each rank owns the equal slice of another copy; null: there is one copy
};

// The ranks that gradients are reduced with, and where the results go.
struct ReduceRoutes {
  comm::Communicator& slices;  // its ranks own the slices of a bucket
  // Ranks that own equal slices in other such groups (MiCS, Zhang et al., arXiv:2205.00119, section 3.3: their sums are
  // joined once, at the boundary of an accumulation); null where `slices` is all there is.
  comm::Communicator* replicas = nullptr;
  // Compresses gradients and exchanges them over the ranks of `slices`, in place of their all-reduce or reduce-scatter;
  // null: they are sent as they are.
  comm::BucketReduction* reduction = nullptr;
  // Keeps the reduced slices of the buckets it takes, which a step then reads there; null: all stay on the device.
  // With it, gradients leave their buckets one by one also where one rank owns all slices.
  ReducedGradients* elsewhere = nullptr;
};

}  // namespace ds::zero
