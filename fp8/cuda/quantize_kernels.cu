// fp8/quantize_device_kernels.h for CUDA, by the rules of fp8/quantize_rules.h: a tensor in one pass where its stored
// scale is good, in two where it is not, rows and blocks in one. Compiled without fused multiply-adds of the compiler's
// own; registered when the library is loaded.
#include "fp8/quantize_device_kernels.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "core/cuda/warp_team.h"

namespace ds::fp8 {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpLanes;
constexpr int64_t kMostBlocks = 1 << 12;  // of a tensor: each ends with an atomic operation on one place
constexpr int64_t kMostParts = 1 << 16;   // more: blocks take several turns

// The largest of all threads of a block, for each of them.
__device__ int32_t largest_of_block(int32_t most) {
  __shared__ int32_t of_warps[kWarps];
  most = WarpTeam::largest_of_lanes(most);
  __syncthreads();  // the last call's have been read
  if (threadIdx.x % kWarpLanes == 0) of_warps[threadIdx.x / kWarpLanes] = most;
  __syncthreads();
  for (int warp = 0; warp < kWarps; ++warp) most = max(most, of_warps[warp]);
  return most;
}

// The threads of a block, as core/block_rules.h says.
class BlockTeam {
 public:
  template <class Body>
  __device__ void each(int64_t count, const Body& body) const {
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < count; i += kThreads) body(i);
  }

  template <class Body>
  __device__ int32_t largest(int64_t count, const Body& body) const {
    int32_t most = 0;
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < count; i += kThreads) most = max(most, body(i));
    return largest_of_block(most);
  }

  template <class Body>
  __device__ void once(const Body& body) const {
    if (threadIdx.x == 0) body();
  }
};

template <class Format, class To>
__global__ void __launch_bounds__(kThreads) measure_kernel(QuantizeArrays arrays, WholeTensor whole) {
  const WholeQuantizeRule<Format, To> rule(arrays, whole);
  int32_t most = 0;
#pragma unroll 4
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < whole.numel; i += int64_t{gridDim.x} * kThreads) {
    most = max(most, rule.measure(i));
  }
  most = largest_of_block(most);
  if (threadIdx.x == 0) atomicMax(whole.amax, most);
}

template <class Format, class To>
__global__ void __launch_bounds__(kThreads) settle_kernel(QuantizeArrays arrays, WholeTensor whole) {
  const WholeQuantizeRule<Format, To> rule(arrays, whole);
  const float amax = float_of_bits(static_cast<uint32_t>(*whole.amax));
  const float scale = rule.scale(amax);
  if (blockIdx.x == 0 && threadIdx.x == 0) *arrays.inverse = inverse_of_scale(scale, amax);
  if (rule.stored_is_good(amax)) return;
#pragma unroll 4
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < whole.numel; i += int64_t{gridDim.x} * kThreads) {
    rule.settle(i, scale);
  }
}

template <class Format, class To>
__global__ void __launch_bounds__(kThreads) rows_kernel(QuantizeArrays arrays, MatrixParts parts) {
  const PartQuantizeRule<Format, To> rule(arrays, parts);
  const int64_t step = int64_t{gridDim.x} * kWarps;
  for (int64_t part = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarpLanes; part < parts.count(); part += step) {
    rule(part, WarpTeam());
  }
}

template <class Format, class To>
__global__ void __launch_bounds__(kThreads) blocks_kernel(QuantizeArrays arrays, MatrixParts parts) {
  const PartQuantizeRule<Format, To> rule(arrays, parts);
  for (int64_t part = blockIdx.x; part < parts.count(); part += gridDim.x) rule(part, BlockTeam());
}

const char* text_of(cudaError_t error) { return error == cudaSuccess ? nullptr : cudaGetErrorString(error); }

// use(format of the values, format of 8 bits)
template <class Use>
void with_formats(const QuantizeArrays& arrays, const Use& use) {
  with_float_format(arrays.format, [&](auto from) { with_eight_bits(arrays.to, [&](auto to) { use(from, to); }); });
}

const char* quantize_whole(const QuantizeArrays& arrays, const WholeTensor& whole, void* handle) {
  const auto stream = static_cast<cudaStream_t>(handle);
  const cudaError_t cleared = cudaMemsetAsync(whole.amax, 0, sizeof(*whole.amax), stream);
  if (cleared != cudaSuccess) return text_of(cleared);
  const auto blocks =
      static_cast<unsigned>(std::clamp<int64_t>((whole.numel + 4 * kThreads - 1) / (4 * kThreads), 1, kMostBlocks));
  with_formats(arrays, [&](auto from, auto to) {
    measure_kernel<decltype(from), decltype(to)><<<blocks, kThreads, 0, stream>>>(arrays, whole);
    settle_kernel<decltype(from), decltype(to)><<<blocks, kThreads, 0, stream>>>(arrays, whole);
  });
  return text_of(cudaGetLastError());
}

const char* quantize_matrix_parts(const QuantizeArrays& arrays, const MatrixParts& parts, void* handle) {
  if (parts.count() == 0) return nullptr;
  const auto stream = static_cast<cudaStream_t>(handle);
  const int64_t wanted = parts.height == 1 ? (parts.count() + kWarps - 1) / kWarps : parts.count();
  const auto blocks = static_cast<unsigned>(std::min(wanted, kMostParts));
  with_formats(arrays, [&](auto from, auto to) {
    const auto kernel =
        parts.height == 1 ? rows_kernel<decltype(from), decltype(to)> : blocks_kernel<decltype(from), decltype(to)>;
    kernel<<<blocks, kThreads, 0, stream>>>(arrays, parts);
  });
  return text_of(cudaGetLastError());
}

constexpr QuantizeDeviceKernels kCudaQuantize{quantize_whole, quantize_matrix_parts};

const bool kQuantizeRegistered = (set_quantize_device_kernels(&kCudaQuantize), true);

}  // namespace
}  // namespace ds::fp8
