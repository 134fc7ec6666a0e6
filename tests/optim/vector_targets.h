// Running the vector kernels with each instruction set that the machine has.
#pragma once

#include <hwy/highway.h>

#include <cstdint>

namespace ds::optimizers {

// Until it goes out of scope, kernels run with `target` (an HWY_* bit).
class WithTarget {
 public:
  explicit WithTarget(int64_t target) { choose(target); }
  ~WithTarget() { choose(0); }
  WithTarget(const WithTarget&) = delete;
  WithTarget& operator=(const WithTarget&) = delete;

 private:
  static void choose(int64_t target) {
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
};

}  // namespace ds::optimizers
