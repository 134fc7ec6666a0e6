// Whether the next update may begin before its gradient is judged. Torch-free.
//
// A speculative update that is rolled back costs a copy and an update for nothing. After kFailures of them in a row
// speculation pauses, for kPause optimizer steps at first; then one more is tried. Each that fails is followed by a
// pause twice as long, up to kLongestPause. It follows from outcomes that all ranks share: all of them decide alike.
#pragma once

#include <cstdint>

namespace ds::engine {

enum class SpeculationOutcome { kNone, kStood, kRolledBack };  // kNone: the step did without

class SpeculationGate {
 public:
  static constexpr int64_t kFailures = 3;
  static constexpr int64_t kPause = 32;
  static constexpr int64_t kLongestPause = 1024;

  bool open() const { return pause_left_ == 0; }
  // Once in every optimizer step, skipped ones too. Returns how many steps the pause that begins now lasts, else 0.
  int64_t step(SpeculationOutcome outcome);

  int64_t pauses() const { return pauses_; }  // so far
  int64_t stood() const { return stood_; }
  int64_t rolled_back() const { return rolled_back_; }
  int64_t steps_without() const { return without_; }

 private:
  int64_t failures_in_a_row_ = 0;
  int64_t next_pause_ = kPause;
  int64_t pause_left_ = 0;
  int64_t pauses_ = 0;
  int64_t stood_ = 0;
  int64_t rolled_back_ = 0;
  int64_t without_ = 0;
};

}  // namespace ds::engine
