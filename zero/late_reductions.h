// How long a gradient's hook waits for a reduction at stage 3.
//
// Note [Hooks that wait at stage 3]
// A hook that waits for a reduction keeps this rank from its next gather. Ranks that have no gradient for a parameter
// start the reduction of its bucket at the end of their backward only, which they do not reach without that gather. A
// slow network looks like that from here: each pass that finds a reduction late lets the next ones wait for
// twice as long, and after kMostPasses of them no hook waits any more.
#pragma once

#include <chrono>
#include <cstddef>
#include <optional>

#include "comm/collective.h"

namespace ds::zero {

// Not thread safe: used under the reducer's lock.
class LateReductions {
 public:
  static constexpr int kMostPasses = 4;

  // How long a hook waits at first; none: as long as it takes, and nothing is ever late.
  explicit LateReductions(std::optional<std::chrono::milliseconds> patience) : patience_(patience) {}

  void begin_pass() { late_in_this_pass_ = false; }
  // Whether the reduction of `bucket` can be waited for without waiting for other ranks: true as soon as it is so,
  // false once it is late. In a pass in which one was late, and when kMostPasses were, hooks do not wait at all. Logs a
  // warning when that begins.
  bool in_time(const comm::Work& work, size_t bucket);
  // Passes in which a reduction was late.
  int passes() const { return passes_; }

 private:
  std::optional<std::chrono::milliseconds> patience_;
  int passes_ = 0;
  bool late_in_this_pass_ = false;
};

}  // namespace ds::zero
