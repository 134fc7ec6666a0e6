// How far another host's steady clock is ahead of ours, from questions and answers. Pure.
#pragma once

#include <cstdint>
#include <limits>

namespace ds::launcher {

class ClockDifference {
 public:
  // An answer: asked and received at these times of our clock, answered at that time of the other one; nanoseconds. The
  // answer with the shortest way there and back counts: it is wrong by half of that at most.
  void take(int64_t asked, int64_t answered, int64_t received) {
    if (received - asked >= round_trip_) return;
    round_trip_ = received - asked;
    ahead_ = answered - (asked + round_trip_ / 2);
  }

  // Our time when the other clock shows `there`, and back.
  int64_t here(int64_t there) const { return there - ahead_; }
  int64_t there(int64_t here) const { return here + ahead_; }

 private:
  int64_t round_trip_ = std::numeric_limits<int64_t>::max();
  int64_t ahead_ = 0;
};

}  // namespace ds::launcher
