// What a ZeRO stage up to 2 does with gradients. Torch-free: the plan chooses, the reducer acts.
#pragma once

namespace ds::zero {

enum class ReductionPolicy {
  kAllReduce,                  // stage 0: whole buckets, at the boundary
  kReduceScatterAtBoundary,    // stage 1: local accumulation, own slice at the boundary
  kReduceScatterEveryBackward  // stage 2: own slice after every backward, the bucket is released
};

}  // namespace ds::zero
