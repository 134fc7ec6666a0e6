// The order in which the buckets of a model are reduced, and the reductions under way.
#pragma once

#include <c10/util/FunctionRef.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "comm/collective.h"
#include "zero/reduction/gradient_bucket.h"
#include "zero/reduction/gradient_exchange.h"

namespace ds::zero {

// Note [Hooks that wait at stage 3]
// A hook that waits for a reduction keeps this rank from its next gather. Ranks that have no gradient for a parameter
// start the reduction of its bucket at the end of their backward only, which they do not reach without that gather. A
// slow network looks like that from here: each pass that finds a reduction late lets the next ones wait for
// twice as long, and after kMostPasses of them no hook waits any more. What was slow once may be quick again: late
// passes are forgotten, one after kForgottenAfter passes without another, and later each time that this was too early.
//
// A device works off what the host gave it long before: time counts from when it has come to the launch.

// Decides for hooks whether a reduction is worth waiting for. Not thread safe: used under the reducer's lock.
class LateReductions {
 public:
  static constexpr int kMostPasses = 4;
  static constexpr int64_t kForgottenAfter = 64;

  // How long a hook waits at first; none: as long as it takes, and nothing is ever late.
  explicit LateReductions(std::optional<std::chrono::milliseconds> patience) : patience_(patience) {}

  void begin_pass();
  // Whether the reduction of `bucket` can be waited for without waiting for other ranks: true as soon as it is so,
  // false once it is late. In a pass in which one was late, and when kMostPasses were, hooks do not wait at all. Logs a
  // warning when that begins. `launched`: whether the device has come to where it was launched.
  bool in_time(const comm::Work& work, size_t bucket, c10::function_ref<bool()> launched);
  // The number of passes in which a reduction was late, without those that are forgotten.
  int passes() const { return passes_; }

 private:
  bool be_late(size_t bucket, std::chrono::milliseconds waited);

  std::optional<std::chrono::milliseconds> patience_;
  int passes_ = 0;
  int64_t since_late_ = 0;                     // passes
  int64_t forgotten_after_ = kForgottenAfter;  // passes without a late one
  bool warned_ = false;
  bool late_in_this_pass_ = false;
};

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
  void launch_rest();
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
