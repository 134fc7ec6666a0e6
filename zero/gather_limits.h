// How much of a model is gathered at a time at stage 3. Torch-free: the plan chooses, the gatherer acts.
#pragma once

#include <cstdint>

namespace ds::zero {

// In elements, with DeepSpeed's names for them.
struct GatherLimits {
  int64_t max_live = 1'000'000'000;            // stage3_max_live_parameters: gathered at once; what an operator needs
                                               // is gathered beyond it
  int64_t max_reuse_distance = 1'000'000'000;  // stage3_max_reuse_distance: what is used again sooner stays
  int64_t prefetch = 50'000'000;               // stage3_prefetch_bucket_size: on their way ahead of use

  bool operator==(const GatherLimits&) const = default;
};

}  // namespace ds::zero
