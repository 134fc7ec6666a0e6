#include "zero/late_reductions.h"

#include <thread>

#include "core/log.h"

namespace ds::zero {

bool LateReductions::in_time(const comm::Work& work, size_t bucket) {
  if (!patience_) return true;
  const auto begin = std::chrono::steady_clock::now();
  const auto until = begin + *patience_ * (1 << passes_);
  while (!work.is_ready()) {
    if (late_in_this_pass_ || passes_ == kMostPasses) return false;
    if (std::chrono::steady_clock::now() < until) {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
      continue;
    }
    late_in_this_pass_ = true;
    if (++passes_ == kMostPasses) {
      log::warning("the reduction of gradients of bucket ", bucket, " is late, as others were in ", kMostPasses - 1,
                   " backward passes before: another rank has no gradient for a parameter in it, ",
                   "or the network is slower than ", std::chrono::duration<double>(until - begin).count(),
                   " s for a bucket. Gradients stay in memory until backward ends from now on");
    }
    return false;
  }
  return true;
}

}  // namespace ds::zero
