#include "profiling/meters.h"
#include "core/check.h"
#include "core/text.h"

#include <chrono>
#include <fstream>
#include <iomanip>
#include <sstream>
#include <string>
#include <utility>

namespace ds::profiling {
namespace {

constexpr std::array<const char*, kPhaseCount> kNames = {"fwd", "bwd", "bwd_inner", "bwd_allreduce", "step"};
constexpr double kMillisecondsPerSecond = 1e3;

std::string line_of(const std::array<double, kPhaseCount>& seconds, const char* suffix) {
  auto line = classic_stream<std::ostringstream>();
  line << "time (ms)" << std::fixed << std::setprecision(2);
  for (size_t i = 0; i < kPhaseCount; ++i) {
    line << " | " << kNames[i] << suffix << ": " << seconds[i] * kMillisecondsPerSecond;
  }
  return std::move(line).str();
}

constexpr int64_t kBytesPerKilobyte = 1024;

// "VmHWM:    1234 kB"
int64_t read_status(const std::string& key) {
  auto status = classic_stream<std::ifstream>("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (!line.starts_with(key)) continue;
    auto rest = classic_stream<std::istringstream>(line.substr(key.size()));
    int64_t kilobytes = 0;
    if (rest >> kilobytes) return kilobytes * kBytesPerKilobyte;
  }
  throw IoError(cat("memory of this process: expected a line \"", key, "\" in /proc/self/status, found none"));
}

}  // namespace

double monotonic_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void StepTimers::add(Phase phase, double seconds) {
  micro_step_[static_cast<size_t>(phase)] += seconds;
  step_[static_cast<size_t>(phase)] += seconds;
}

std::string StepTimers::finish_micro_step() { return line_of(std::exchange(micro_step_, {}), "_microstep"); }

std::string StepTimers::finish_step() { return line_of(std::exchange(step_, {}), ""); }

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

int64_t resident_bytes() { return read_status("VmRSS:"); }
int64_t peak_resident_bytes() { return read_status("VmHWM:"); }

}  // namespace ds::profiling
