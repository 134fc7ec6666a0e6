// The lanes of a warp as a team, as core/numbers/block_rules.h says. For CUDA kernels of any folder.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace ds {

constexpr int kWarpLanes = 32;

class WarpTeam {
 public:
  template <class Body>
  __device__ void each(int64_t count, const Body& body) const {
#pragma unroll 4
    for (int64_t i = threadIdx.x % kWarpLanes; i < count; i += kWarpLanes) body(i);
  }

  template <class Body>
  __device__ int32_t largest(int64_t count, const Body& body) const {
    int32_t most = 0;
#pragma unroll 4
    for (int64_t i = threadIdx.x % kWarpLanes; i < count; i += kWarpLanes) most = max(most, body(i));
    return largest_of_lanes(most);
  }

  template <class Body>
  __device__ void once(const Body& body) const {
    if (threadIdx.x % kWarpLanes == 0) body();
  }

  // Called by whole warps.
  __device__ static int32_t largest_of_lanes(int32_t most) {
    for (int lanes = kWarpLanes / 2; lanes > 0; lanes /= 2) most = max(most, __shfl_xor_sync(0xFFFFFFFFU, most, lanes));
    return most;
  }
};

}  // namespace ds
