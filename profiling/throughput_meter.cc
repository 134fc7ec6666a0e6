#include "profiling/throughput_meter.h"

#include "core/text.h"

namespace ds::profiling {

void ThroughputMeter::add_step(double seconds, int64_t samples, int64_t tokens) {
  if (++steps_ <= kSkippedSteps) return;
  seconds_ += seconds;
  samples_ += samples;
  tokens_ += tokens;
  current_samples_per_second_ = rate(static_cast<double>(samples), seconds);
}

std::string ThroughputMeter::summary() const {
  return cat("RunningAvgSamplesPerSec=", samples_per_second(), ", CurrSamplesPerSec=", current_samples_per_second());
}

}  // namespace ds::profiling
