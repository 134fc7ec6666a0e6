#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <vector>

#include "profiling/meters.h"

namespace ds::profiling {
namespace {

TEST(StepTimers, PrintDeepSpeedsLines) {
  double now = 100.0;
  StepTimers timers([&now] { return now; });
  const auto phase = [&](Phase which, double seconds) {
    const auto span = timers.measure(which);
    now += seconds;
  };
  phase(Phase::kForward, 0.0125);
  phase(Phase::kBackward, 0.5);
  EXPECT_EQ(timers.finish_micro_step(),
            "time (ms) | fwd_microstep: 12.50 | bwd_microstep: 500.00 | bwd_inner_microstep: 0.00 | "
            "bwd_allreduce_microstep: 0.00 | step_microstep: 0.00");
  phase(Phase::kForward, 0.0125);
  timers.add(Phase::kBackwardReduce, 0.001);
  phase(Phase::kStep, 0.002);
  EXPECT_DOUBLE_EQ(timers.micro_step_seconds(Phase::kBackward), 0.0);
  EXPECT_NEAR(timers.step_seconds(Phase::kForward), 0.025, 1e-12);
  EXPECT_EQ(timers.finish_step(),
            "time (ms) | fwd: 25.00 | bwd: 500.00 | bwd_inner: 0.00 | bwd_allreduce: 1.00 | step: 2.00");
  EXPECT_DOUBLE_EQ(timers.step_seconds(Phase::kForward), 0.0);
}

TEST(StepTimers, TheClockNeverGoesBack) {
  const double first = monotonic_seconds();
  EXPECT_GE(monotonic_seconds(), first);
}

TEST(ThroughputMeter, SkipsTheFirstTwoSteps) {
  ThroughputMeter meter;
  meter.add_step(10.0, 8, 800);
  meter.add_step(10.0, 8, 800);
  EXPECT_EQ(meter.counted_steps(), 0);
  EXPECT_EQ(meter.samples_per_second(), 0.0);
  meter.add_step(1.0, 8, 800);
  meter.add_step(3.0, 8, 800);
  EXPECT_EQ(meter.counted_steps(), 2);
  EXPECT_DOUBLE_EQ(meter.samples_per_second(), 4.0);
  EXPECT_DOUBLE_EQ(meter.tokens_per_second(), 400.0);
  EXPECT_DOUBLE_EQ(meter.current_samples_per_second(), 8.0 / 3.0);
  EXPECT_EQ(meter.summary(), "RunningAvgSamplesPerSec=4, CurrSamplesPerSec=2.66667");
}

TEST(ProcessMemory, PeakStaysWhenMemoryIsReturned) {
  const int64_t before = resident_bytes();
  EXPECT_GT(before, 0);
  constexpr size_t kBytes = size_t{64} << 20;
  {
    std::vector<char> block(kBytes, 1);
    EXPECT_GT(resident_bytes() + block[kBytes / 2], before + static_cast<int64_t>(kBytes) * 3 / 4);
  }
  EXPECT_GT(peak_resident_bytes(), before + static_cast<int64_t>(kBytes) * 3 / 4);
  EXPECT_GE(peak_resident_bytes(), resident_bytes());
}

}  // namespace
}  // namespace ds::profiling
