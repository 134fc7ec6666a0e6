// Meters of a training step: wall-clock time of its phases (wall_clock_breakdown), samples and tokens per second,
// memory of the process. Torch-free.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
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

// Samples and tokens per second of a run. The first steps allocate, page in and warm up: they do not count. Not thread
// safe.
class ThroughputMeter {
 public:
  static constexpr int64_t kSkippedSteps = 2;  // as many as DeepSpeed skips

  // One optimizer step has ended, over all ranks.
  void add_step(double seconds, int64_t samples, int64_t tokens = 0);

  // The rates over all counted steps; 0 before the first of them.
  double samples_per_second() const { return rate(static_cast<double>(samples_), seconds_); }
  double tokens_per_second() const { return rate(static_cast<double>(tokens_), seconds_); }
  // The last step's rate; 0 before the first counted step.
  double current_samples_per_second() const { return current_samples_per_second_; }
  int64_t counted_steps() const { return steps_ > kSkippedSteps ? steps_ - kSkippedSteps : 0; }

  // "RunningAvgSamplesPerSec=12.5, CurrSamplesPerSec=13.1", as in DeepSpeed's line.
  std::string summary() const;

 private:
  static double rate(double amount, double seconds) { return seconds > 0 ? amount / seconds : 0.0; }

  int64_t steps_ = 0;
  double seconds_ = 0;
  int64_t samples_ = 0;
  int64_t tokens_ = 0;
  double current_samples_per_second_ = 0;
};

// Bytes of this process that are in memory now (VmRSS), and the most that were so far (VmHWM), as Linux counts them.
// Both count pages shared with other processes and pages of mapped files. Throw IoError where /proc/self/status cannot
// be read.
int64_t resident_bytes();
int64_t peak_resident_bytes();

}  // namespace ds::profiling
