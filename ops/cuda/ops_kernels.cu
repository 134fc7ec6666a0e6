// ops/device_kernels.h for CUDA: the rules of ops/kernels, one block of threads for a row of a norm, packs of sixteen
// bytes. Compiled without fused multiply-adds of the compiler's own; registered when the library is loaded.
//
// Norms read a row two or three times, but from memory once: it stays in the first cache.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "ops/device_kernels.h"
#include "ops/kernels/norm_rules.h"
#include "ops/kernels/pack_choice.h"
#include "ops/kernels/rope_rules.h"
#include "ops/kernels/swiglu_rules.h"

namespace ds::ops {
namespace {

constexpr int kMostThreads = 512;
constexpr int64_t kForwardPacks = 4;   // of a thread
constexpr int64_t kBackwardPacks = 2;  // whose blocks are fewer
constexpr int kThreads = 256;          // of passes over elements
constexpr int64_t kMostBlocks = 1 << 16;
constexpr size_t kSharedBytes = 40 << 10;  // for sums of gradients, beside those of the team

__device__ float shuffled(float v, int lanes) { return __shfl_xor_sync(0xFFFFFFFFU, v, lanes); }
__device__ double shuffled(double v, int lanes) { return __shfl_xor_sync(0xFFFFFFFFU, v, lanes); }
template <class T>
__device__ TwoSums<T> shuffled(const TwoSums<T>& v, int lanes) {
  return {shuffled(v.first, lanes), shuffled(v.second, lanes)};
}

// The threads of a block, as row_rules.h says.
class BlockTeam {
 public:
  template <class Body>
  __device__ void each(int64_t count, const Body& body) const {
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < count; i += blockDim.x) body(i);
  }

  template <class T, class Body>
  __device__ T sum(int64_t count, T part, const Body& body) const {
    __shared__ alignas(16) unsigned char memory[kMostThreads / kWarp * sizeof(T)];
    T* const warps = reinterpret_cast<T*>(memory);
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < count; i += blockDim.x) part = body(i, part);
    for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) part = part + shuffled(part, lanes);
    __syncthreads();  // the sum before is read
    if (threadIdx.x % kWarp == 0) warps[threadIdx.x / kWarp] = part;
    __syncthreads();
    T total = warps[0];
    for (int warp = 1; warp < static_cast<int>(blockDim.x) / kWarp; ++warp) total = total + warps[warp];
    return total;
  }
};

template <class Format, bool kCentered, int kPack>
__global__ void __launch_bounds__(kMostThreads)
    norm_forward_kernel(const __grid_constant__ NormForward norm, int64_t rows) {
  const NormForwardRule<Format, kCentered, kPack> rule(norm);
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) rule(row, BlockTeam());
}

// `in_shared`: the sums of a block are made in shared memory, else where they go.
template <class Format, bool kCentered, int kPack>
__global__ void __launch_bounds__(kMostThreads)
    norm_backward_kernel(NormBackward norm, const __grid_constant__ NormBlocks blocks, bool in_shared) {
  using T = WideOf<Format>;
  extern __shared__ __align__(32) unsigned char shared[];  // of a pack: eight floats
  const BlockTeam team;
  void* const results[2] = {row_at<WideBits<T>>(norm.weight_gradient, blockIdx.x, norm.size),
                            row_at<WideBits<T>>(norm.bias_gradient, blockIdx.x, norm.size)};
  void* sums[2] = {results[0], results[1]};
  T* next = reinterpret_cast<T*>(shared);
  for (void*& sum : sums) {
    if (sum == nullptr) continue;
    if (in_shared) {
      sum = next;
      next += norm.size;
    }
    void* const zeroed = sum;
    team.each(norm.size / kPack, [=](int64_t i) { store_pack<WideBits<T>, kPack>(zeroed, i, Pack<T, kPack>{}); });
  }
  norm.weight_gradient = sums[0];
  norm.bias_gradient = sums[1];
  const NormBackwardRule<Format, kCentered, kPack> rule(norm);
  const int64_t begin = blockIdx.x * blocks.length;
  const int64_t end = min(blocks.rows, begin + blocks.length);
  for (int64_t row = begin; row < end; ++row) rule(row, team);
  for (int s = 0; s < 2; ++s) {
    if (results[s] == nullptr || results[s] == sums[s]) continue;
    void* const to = results[s];
    const void* const from = sums[s];
    team.each(norm.size / kPack,
              [=](int64_t i) { store_pack<WideBits<T>, kPack>(to, i, load_pack<WideBits<T>, kPack>(from, i)); });
  }
}

template <class Format, int kPack, class Arrays>
__global__ void __launch_bounds__(kThreads)
    swiglu_kernel(const __grid_constant__ Arrays arrays, const __grid_constant__ RowsOf of) {
  const int64_t packs = of.columns / kPack;
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < of.rows * packs; i += step) {
    if constexpr (std::is_same_v<Arrays, SwigluForward>) {
      swiglu_forward_pack<Format, kPack>(arrays, of, i / packs, i % packs);
    } else {
      swiglu_backward_pack<Format, kPack>(arrays, of, i / packs, i % packs);
    }
  }
}

template <class Format, int kPack>
__global__ void __launch_bounds__(kThreads) rope_kernel(const __grid_constant__ RopeRows rows) {
  const int64_t items = rope_items(rows, kPack);
  const int64_t all = rope_row_count(rows) * items;
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < all; i += step) {
    RopeRule<Format, kPack>(rows, i / items)(i % items);
  }
}

const char* last_error() {
  const cudaError_t error = cudaGetLastError();
  if (error == cudaErrorNoKernelImageForDevice) return kNoKernelImage;
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

// Whole warps whose threads have `each` packs of a row, two of them for shorter rows. More threads would wait for one
// another more often than they would read at once: what hides the memory's latency are the other rows of a processor.
unsigned threads_of(int64_t packs, int64_t each) {
  const auto warps = [=](int64_t of_a_warp) { return (packs + of_a_warp - 1) / of_a_warp; };
  const int64_t wanted = std::max(warps(kWarp * each), std::min<int64_t>(warps(kWarp), 2));
  return static_cast<unsigned>(kWarp * std::clamp<int64_t>(wanted, 1, kMostThreads / kWarp));
}

unsigned blocks_of(int64_t items) {
  return static_cast<unsigned>(std::min<int64_t>((items + kThreads - 1) / kThreads, kMostBlocks));
}

const char* norm_forward_of(const NormForward& norm, int64_t rows, void* stream) {
  if (rows == 0) return nullptr;
  const auto blocks = static_cast<unsigned>(std::min(rows, kMostBlocks));
  with_packs(
      norm.type, [&](auto format) { return norm_packs<decltype(format)>(norm); },
      [&](auto format, auto pack) {
        using Format = decltype(format);
        constexpr int kPack = decltype(pack)::value;
        const auto kernel =
            norm.mean == nullptr ? norm_forward_kernel<Format, false, kPack> : norm_forward_kernel<Format, true, kPack>;
        kernel<<<blocks, threads_of(norm.size / kPack, kForwardPacks), 0, static_cast<cudaStream_t>(stream)>>>(norm,
                                                                                                               rows);
      });
  return last_error();
}

const char* norm_backward_of(const NormBackward& norm, const NormBlocks& blocks, void* stream) {
  if (blocks.blocks == 0) return nullptr;
  const size_t sums = (norm.weight_gradient != nullptr) + (norm.bias_gradient != nullptr);
  const size_t bytes = sums * static_cast<size_t>(norm.size) * wide_bytes_of(norm.type);
  const bool in_shared = bytes <= kSharedBytes;
  with_packs(
      norm.type, [&](auto format) { return norm_packs<decltype(format)>(norm); },
      [&](auto format, auto pack) {
        using Format = decltype(format);
        constexpr int kPack = decltype(pack)::value;
        const auto kernel = norm.mean == nullptr ? norm_backward_kernel<Format, false, kPack>
                                                 : norm_backward_kernel<Format, true, kPack>;
        kernel<<<static_cast<unsigned>(blocks.blocks), threads_of(norm.size / kPack, kBackwardPacks),
                 in_shared ? bytes : 0, static_cast<cudaStream_t>(stream)>>>(norm, blocks, in_shared);
      });
  return last_error();
}

template <class Arrays>
const char* swiglu_of(const Arrays& arrays, const RowsOf& rows, void* stream) {
  if (rows.rows * rows.columns == 0) return nullptr;
  with_packs(
      arrays.type, [&](auto format) { return swiglu_packs<decltype(format)>(arrays, rows); },
      [&](auto format, auto pack) {
        constexpr int kPack = decltype(pack)::value;
        swiglu_kernel<decltype(format), kPack, Arrays>
            <<<blocks_of(rows.rows * (rows.columns / kPack)), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(arrays,
                                                                                                                rows);
      });
  return last_error();
}

const char* rope_of(const RopeRows& rows, void* stream) {
  if (rope_row_count(rows) == 0) return nullptr;
  with_packs(
      rows.type, [&](auto format) { return rope_packs<decltype(format)>(rows); },
      [&](auto format, auto pack) {
        constexpr int kPack = decltype(pack)::value;
        rope_kernel<decltype(format), kPack><<<blocks_of(rope_row_count(rows) * rope_items(rows, kPack)), kThreads, 0,
                                               static_cast<cudaStream_t>(stream)>>>(rows);
      });
  return last_error();
}

int compute_capability_of(int device) {
  int major = 0;
  int minor = 0;
  if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess) {
    return 0;
  }
  return 10 * major + minor;
}

constexpr OpsDeviceKernels kCudaOps{norm_forward_of,           norm_backward_of, swiglu_of<SwigluForward>,
                                    swiglu_of<SwigluBackward>, rope_of,          compute_capability_of};

const bool kOpsRegistered = (set_device_functions(&kCudaOps), true);

}  // namespace
}  // namespace ds::ops
