#include "profiling/step_timers.h"

#include <chrono>
#include <iomanip>
#include <sstream>
#include <utility>

namespace ds::profiling {
namespace {

constexpr std::array<const char*, kPhaseCount> kNames = {"fwd", "bwd", "bwd_inner", "bwd_allreduce", "step"};
constexpr double kMillisecondsPerSecond = 1e3;

std::string line_of(const std::array<double, kPhaseCount>& seconds, const char* suffix) {
  std::ostringstream line;
  line << "time (ms)" << std::fixed << std::setprecision(2);
  for (size_t i = 0; i < kPhaseCount; ++i) {
    line << " | " << kNames[i] << suffix << ": " << seconds[i] * kMillisecondsPerSecond;
  }
  return std::move(line).str();
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

}  // namespace ds::profiling
