// A team of one lane, as the rules of kernels ask for one (core/numbers/block_rules.h): for rules without sums, whose
// results do not depend on how many lanes there are.
#pragma once

#include <algorithm>
#include <cstdint>

namespace ds::simulated_gpu {

class LoneTeam {
 public:
  template <class Body>
  void each(int64_t count, const Body& body) const {
    for (int64_t i = 0; i < count; ++i) body(i);
  }

  template <class Body>
  int32_t largest(int64_t count, const Body& body) const {
    int32_t most = 0;
    for (int64_t i = 0; i < count; ++i) most = std::max(most, body(i));
    return most;
  }

  template <class Body>
  void once(const Body& body) const {
    body();
  }
};

}  // namespace ds::simulated_gpu
