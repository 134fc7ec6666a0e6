// core/numbers/block_device_kernels.h for CUDA: the rules of core/numbers/block_rules.h, a warp for each block of
// values, which stay in the first cache from the search for the largest to the rounding. Compiled without fused
// multiply-adds; registered when the library is loaded.
#include "core/numbers/block_device_kernels.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "core/cuda/warp_team.h"

namespace ds::compression {
namespace {

constexpr int kBlockThreads = 256;  // of a block of CUDA's
constexpr int kWarps = kBlockThreads / kWarpLanes;
constexpr int64_t kMostValueBlocks = 1 << 16;  // more work than this: warps take several turns

template <class Rule>
__device__ void run_blocks(const Rule& rule, int64_t blocks) {
  const int64_t step = int64_t{gridDim.x} * kWarps;
  for (int64_t block = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarpLanes; block < blocks; block += step) {
    rule(block, WarpTeam());
  }
}

template <class Format, int kPack>
__global__ void __launch_bounds__(kBlockThreads)
    encode_blocks_kernel(const __grid_constant__ BlockArrays arrays, const void* values, uint8_t* encoded) {
  run_blocks(BlockEncodeRule<Format, kPack>(arrays, values, encoded), arrays.blocks());
}

template <class Format, int kPack>
__global__ void __launch_bounds__(kBlockThreads)
    sum_blocks_kernel(const __grid_constant__ BlockArrays arrays, const __grid_constant__ BlockParts parts,
                      void* values) {
  run_blocks(BlockSumRule<Format, kPack>(arrays, parts, values), arrays.blocks());
}
static_assert(sizeof(BlockArrays) + sizeof(BlockParts) + sizeof(void*) <= 4096, "arguments of a kernel");

unsigned block_grid_of(const BlockArrays& arrays) {
  return static_cast<unsigned>(std::min((arrays.blocks() + kWarps - 1) / kWarps, kMostValueBlocks));
}

const char* last_block_error() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

const char* launch_encode_blocks(const BlockArrays& arrays, const void* values, uint8_t* encoded, void* stream) {
  if (arrays.numel == 0) return nullptr;
  with_block_packs(arrays.format, values, &encoded, 1, [&](auto format, auto pack) {
    encode_blocks_kernel<decltype(format), decltype(pack)::value>
        <<<block_grid_of(arrays), kBlockThreads, 0, static_cast<cudaStream_t>(stream)>>>(arrays, values, encoded);
  });
  return last_block_error();
}

const char* launch_sum_blocks(const BlockArrays& arrays, const BlockParts& parts, void* values, void* stream) {
  if (arrays.numel == 0) return nullptr;
  with_block_packs(arrays.format, values, parts.of, parts.count, [&](auto format, auto pack) {
    sum_blocks_kernel<decltype(format), decltype(pack)::value>
        <<<block_grid_of(arrays), kBlockThreads, 0, static_cast<cudaStream_t>(stream)>>>(arrays, parts, values);
  });
  return last_block_error();
}

constexpr BlockDeviceKernels kCudaBlockKernels{launch_encode_blocks, launch_sum_blocks};

const bool kBlocksRegistered = (set_device_functions(&kCudaBlockKernels), true);

}  // namespace
}  // namespace ds::compression
