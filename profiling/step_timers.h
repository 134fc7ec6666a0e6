// Wall-clock time of the phases of a training step (wall_clock_breakdown). Torch-free.
#pragma once

#include <array>
#include <cstddef>
#include <functional>
#include <string>
#include <utility>

namespace ds::profiling {

// kBackward is the whole of it, kBackwardInner its autograd part; kBackwardReduce is the wait for reductions that
// backward did not hide, and part of kStep.
enum class Phase { kForward, kBackward, kBackwardInner, kBackwardReduce, kStep };
inline constexpr size_t kPhaseCount = 5;

// Seconds since some fixed point, never going back.
double monotonic_seconds();

// Adds up times per phase, for the running micro-step and for the running optimizer step. Not thread safe.
class StepTimers {
 public:
  using Clock = std::function<double()>;

  // `clock` in seconds. For a device, one that waits for the device before it reads the time.
  explicit StepTimers(Clock clock = monotonic_seconds) : clock_(std::move(clock)) {}

  // Measures from its making to its end.
  class Span {
   public:
    Span(StepTimers& timers, Phase phase) : timers_(timers), phase_(phase), begin_(timers.clock_()) {}
    ~Span() { timers_.add(phase_, timers_.clock_() - begin_); }
    Span(const Span&) = delete;
    Span& operator=(const Span&) = delete;

   private:
    StepTimers& timers_;
    Phase phase_;
    double begin_;
  };
  [[nodiscard]] Span measure(Phase phase) { return Span(*this, phase); }

  void add(Phase phase, double seconds);
  double micro_step_seconds(Phase phase) const { return micro_step_[static_cast<size_t>(phase)]; }
  double step_seconds(Phase phase) const { return step_[static_cast<size_t>(phase)]; }

  // Start a new micro-step or optimizer step. Return DeepSpeed's line about the one that ended:
  // "time (ms) | fwd_microstep: 1.20 | bwd_microstep: 2.50 | bwd_inner_microstep: ... | bwd_allreduce_microstep: ... |
  // step_microstep: ..." and "time (ms) | fwd: ... | bwd: ... | bwd_inner: ... | bwd_allreduce: ... | step: ...".
  std::string finish_micro_step();
  std::string finish_step();

 private:
  using Seconds = std::array<double, kPhaseCount>;

  Clock clock_;
  Seconds micro_step_{};
  Seconds step_{};
};

}  // namespace ds::profiling
