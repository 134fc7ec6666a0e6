#include "zero/reduction/late_reductions.h"

#include <thread>
#include <utility>

#include "core/log.h"

namespace ds::zero {
namespace {

// The longest time that a device takes to come to a launch: in training it is seconds behind at most.
constexpr std::chrono::seconds kLongestWay{30};

}  // namespace

void LateReductions::begin_pass() {
  late_in_this_pass_ = false;
  if (passes_ == 0 || ++since_late_ < forgotten_after_) return;
  since_late_ = 0;
  --passes_;
}

bool LateReductions::in_time(const comm::Work& work, size_t bucket, c10::function_ref<bool()> launched) {
  using Clock = std::chrono::steady_clock;
  if (!patience_) return true;
  const std::chrono::milliseconds patience = *patience_ * (1 << passes_);
  Clock::time_point until = Clock::now() + kLongestWay;
  bool counts = false;
  while (!work.is_ready()) {
    if (late_in_this_pass_ || passes_ == kMostPasses) return false;
    if (!counts && launched()) {
      counts = true;
      until = Clock::now() + patience;
    }
    if (Clock::now() >= until) return be_late(bucket, patience);
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return true;
}

bool LateReductions::be_late(size_t bucket, std::chrono::milliseconds waited) {
  late_in_this_pass_ = true;
  since_late_ = 0;
  if (++passes_ < kMostPasses) return false;
  if (!std::exchange(warned_, true)) {
    log::warning("the reduction of gradients of bucket ", bucket, " is late, as others were in ", kMostPasses - 1,
                 " backward passes before: another rank has no gradient for a parameter in it, ",
                 "or the network is slower than ", std::chrono::duration<double>(waited).count(),
                 " s for a bucket. Gradients stay in memory until backward ends from now on, and it is tried again in ",
                 forgotten_after_, " passes (said once)");
  } else {
    forgotten_after_ *= 2;
  }
  return false;
}

}  // namespace ds::zero
