// The time by which something has to have happened, if ever: graces, timeouts, and how long poll() may wait for them.
// Pure, but for the clock where a caller gives no time.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <optional>

#include "launcher/command_line/seconds.h"

namespace ds::launcher {

class Deadline {
 public:
  using Clock = std::chrono::steady_clock;
  using Time = Clock::time_point;

  Deadline() = default;  // never
  // NOLINTBEGIN(google-explicit-constructor): a time is a deadline.
  Deadline(Time time) : time_(time) {}
  Deadline(std::optional<Time> time) : time_(time) {}  // none: never
  // NOLINTEND(google-explicit-constructor)
  static Deadline in(double seconds, Time now = Clock::now()) { return {now + in_seconds(seconds)}; }

  bool passed(Time now = Clock::now()) const { return time_ && now >= *time_; }

  // The sooner of the two deadlines.
  Deadline or_sooner(const Deadline& other) const {
    if (!time_ || !other.time_) return time_ ? *this : other;
    return std::min(*time_, *other.time_);
  }

  // The time left in milliseconds, for poll(): rounded up so that it has passed when poll() returns; at most an hour;
  // -1: no limit.
  int poll_timeout_ms(Time now = Clock::now()) const {
    constexpr double kLongest = 3.6e6;
    if (!time_) return -1;
    const double left = std::chrono::duration<double, std::milli>(*time_ - now).count();
    return static_cast<int>(std::ceil(std::clamp(left, 0.0, kLongest)));
  }

 private:
  std::optional<Time> time_;
};

}  // namespace ds::launcher
