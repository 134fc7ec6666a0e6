// Samples and tokens per second of a run. Torch-free.
#pragma once

#include <cstdint>
#include <string>

namespace ds::profiling {

// The first steps allocate, page in and warm up: they do not count. Not thread safe.
class ThroughputMeter {
 public:
  static constexpr int64_t kSkippedSteps = 2;  // as DeepSpeed

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

}  // namespace ds::profiling
