// The order in which the buckets of a model are reduced, and the reductions under way.
#pragma once

#include <chrono>
#include <cstddef>
#include <optional>
#include <vector>

#include "zero/reduction/gradient_bucket.h"
#include "zero/reduction/gradient_exchange.h"
#include "zero/reduction/late_reductions.h"

namespace ds::zero {

// Launches the reductions of buckets, in every pass the last bucket first, and waits for them. Where a bucket's memory
// goes to the next one, or a reduction needs a copy of it, few are under way at a time. Not thread safe: used under the
// reducer's lock. Throws CommError.
class ReductionQueue {
 public:
  // `buckets` and `exchange` outlive it. `patience`: how long a hook waits for a reduction at first (LateReductions).
  ReductionQueue(std::vector<GradientBucket>& buckets, const GradientExchange& exchange,
                 std::optional<std::chrono::milliseconds> patience)
      : buckets_(buckets), exchange_(exchange), late_(patience) {}

  // Begins a pass: waits for reductions of passes before it, and makes room in their buckets. `in_pass` says for each
  // bucket whether the pass may give it gradients, the same on all ranks; a pass that reduces leaves the others alone.
  // Empty: all may.
  void begin_pass(std::vector<char> in_pass);
  // Whether the pass may give a bucket gradients.
  bool is_in_pass(size_t bucket) const { return in_pass_.empty() || in_pass_[bucket]; }
  // Whether the pass has launched a bucket, or passed over it.
  bool had_its_turn(size_t bucket) const { return buckets_.size() - 1 - bucket < next_; }
  // Launches the buckets whose turn it is and whose gradients are all there. Called inside backward.
  void launch_ready() { launch_next(/*all=*/false); }
  // Ends a pass that reduces: launches the rest of its buckets, whatever gradients they have.
  void end_pass();
  // Launches all buckets that are not launched yet.
  void launch_all();
  // Waits for all reductions under way.
  void complete_all();
  // Waits for all reductions under way and adds what buckets have set aside on the device. Gradients that are kept
  // elsewhere go there.
  void finish();
  // Forgets the reductions that buckets have dropped.
  void clear() { in_flight_.clear(); }

 private:
  void launch_next(bool all);
  void launch(GradientBucket& bucket);
  void complete(GradientBucket& bucket);
  void retire(size_t staying, bool inside_backward);

  std::vector<GradientBucket>& buckets_;
  const GradientExchange& exchange_;
  LateReductions late_;
  std::vector<size_t> in_flight_;  // buckets with a collective under way, oldest first
  size_t next_ = 0;                // buckets_[size - 1 - next_] is the next to be launched in this pass
  std::vector<char> in_pass_;      // for each bucket: the pass may give it gradients; empty: all
};

}  // namespace ds::zero
