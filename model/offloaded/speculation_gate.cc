#include "model/offloaded/speculation_gate.h"

#include <algorithm>

namespace ds::engine {

int64_t SpeculationGate::step(SpeculationOutcome outcome) {
  switch (outcome) {
    case SpeculationOutcome::kNone:
      ++without_;
      if (pause_left_ > 0) --pause_left_;
      return 0;
    case SpeculationOutcome::kStood:
      ++stood_;
      failures_in_a_row_ = 0;
      next_pause_ = kPause;
      return 0;
    case SpeculationOutcome::kRolledBack:
      break;
  }
  ++rolled_back_;
  if (++failures_in_a_row_ < kFailures) return 0;
  ++pauses_;
  pause_left_ = next_pause_;
  next_pause_ = std::min(2 * next_pause_, kLongestPause);
  return pause_left_;
}

}  // namespace ds::engine
