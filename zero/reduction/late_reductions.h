// How long a gradient's hook waits for a reduction at stage 3.
//
// Note [Hooks that wait at stage 3]
// A hook that waits for a reduction keeps this rank from its next gather. Ranks that have no gradient for a parameter
// start the reduction of its bucket at the end of their backward only, which they do not reach without that gather. A
// slow network looks like that from here: each pass that finds a reduction late lets the next ones wait for
// twice as long, and after kMostPasses of them no hook waits any more. What was slow once may be quick again: late
// passes are forgotten, one after kForgottenAfter passes without another, and later each time that this was too early.
//
// A device works off what the host gave it long before: time counts from when it has come to the launch.
#pragma once

#include <c10/util/FunctionRef.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "comm/collective.h"

namespace ds::zero {

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

}  // namespace ds::zero
