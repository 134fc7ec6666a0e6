// compression/sign_device_kernels.h for CUDA. Compiled without fused multiply-adds; registered when the library is
// loaded. Every operation is one kernel for any number of ranges, the scales two.
#include "compression/sign_device_kernels.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

namespace ds::compression {
namespace {

constexpr int kSignThreads = 256;  // of a block, in a row
constexpr int kWarp = 32;
constexpr unsigned kWholeWarp = 0xFFFFFFFF;
constexpr int kAtOnce = 4;  // elements that a thread loads before it works on them, which hides the time of a load
constexpr int64_t kMostSignBlocks = 1 << 16;  // more work than this: blocks take several turns
constexpr int64_t kGap = -1;                  // in place of a range

static_assert(kSignTile % (kAtOnce * kSignThreads) == 0, "all threads of a block take equally many elements of a tile");

// The first index in [low, high) of ascending `numbers` whose number is above `limit`, `high` where there is none.
__device__ int64_t first_above(const int64_t* numbers, int64_t limit, int64_t low, int64_t high) {
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (__ldg(numbers + middle) > limit) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// load(i) is called for elements i < numel. use(i, range or kGap, what was loaded) is called by whole warps, whose
// lanes have elements side by side from a multiple of 32 on; beyond numel with kGap.
template <class Load, class Use>
__device__ void for_each_element(const SignDeviceRanges& ranges, const Load& load, const Use& use) {
  for (int64_t tile = blockIdx.x; tile * kSignTile < ranges.numel; tile += gridDim.x) {
    const int64_t tile_end = (tile + 1) * kSignTile;
    int64_t range = __ldg(ranges.first_ranges + tile);
    const int64_t last = __ldg(ranges.first_ranges + tile + 1);
    for (int64_t first = tile * kSignTile + threadIdx.x; first < tile_end; first += kAtOnce * kSignThreads) {
      decltype(load(first)) loaded[kAtOnce] = {};
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int64_t i = first + k * kSignThreads;
        if (i < ranges.numel) loaded[k] = load(i);
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int64_t i = first + k * kSignThreads;
        range = first_above(ranges.ends, i, range, last);
        const bool inside = i < ranges.numel && range < ranges.count && __ldg(ranges.begins + range) <= i;
        use(i, inside ? range : kGap, loaded[k]);
      }
    }
  }
}

// The sum of what the threads of the block bring, for thread 0. The same tree always.
__device__ double block_sum(double sum) {
  __shared__ double of_warps[kSignThreads / kWarp];
  for (int distance = kWarp / 2; distance > 0; distance /= 2) sum += __shfl_down_sync(kWholeWarp, sum, distance);
  __syncthreads();  // the last call's have been read
  if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return 0;
  double total = 0;
  for (const double of_warp : of_warps) total += of_warp;
  return total;
}

__global__ void sum_parts_kernel(SignDeviceRanges ranges, const float* __restrict__ values, double* __restrict__ sums) {
  for (int64_t part = blockIdx.x; part < ranges.parts; part += gridDim.x) {
    const int64_t range = first_above(ranges.first_parts + 1, part, 0, ranges.count);
    const int64_t begin = ranges.begins[range] + (part - ranges.first_parts[range]) * kSignPart;
    const int64_t end = min(ranges.ends[range], begin + kSignPart);
    double sum = 0;
#pragma unroll 4
    for (int64_t i = begin + threadIdx.x; i < end; i += kSignThreads) {
      const double value = values[i];
      sum += value * value;
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) sums[part] = sum;
  }
}

__global__ void scales_kernel(SignDeviceRanges ranges, const double* __restrict__ sums, float* __restrict__ scales) {
  for (int64_t range = blockIdx.x; range < ranges.count; range += gridDim.x) {
    const int64_t end = ranges.first_parts[range + 1];
    double sum = 0;
    for (int64_t part = ranges.first_parts[range] + threadIdx.x; part < end; part += kSignThreads) sum += sums[part];
    sum = block_sum(sum);
    if (threadIdx.x != 0) continue;
    const int64_t length = ranges.ends[range] - ranges.begins[range];
    scales[range] = static_cast<float>(sqrt(sum / static_cast<double>(length > 0 ? length : 1)));
  }
}

__global__ void encode_signs_kernel(SignDeviceRanges ranges, float* __restrict__ values,
                                    const float* __restrict__ scales, uint8_t* __restrict__ bits) {
  const auto use = [&](int64_t i, int64_t range, float value) {
    const bool plus = range != kGap && value >= 0.0F;
    const unsigned signs = __ballot_sync(kWholeWarp, plus);
    if (i % 8 == 0 && i < ranges.numel) bits[i / 8] = static_cast<uint8_t>(signs >> (threadIdx.x % kWarp));
    if (range == kGap) return;
    const float scale = scales[range];
    values[i] = __fsub_rn(value, plus ? scale : -scale);
  };
  for_each_element(
      ranges, [&](int64_t i) { return values[i]; }, use);
}

__device__ float meaning_of(unsigned byte, int64_t i, float scale) { return byte >> (i % 8) & 1 ? scale : -scale; }

__global__ void decode_signs_kernel(SignDeviceRanges ranges, const uint8_t* __restrict__ bits,
                                    const float* __restrict__ scales, float* __restrict__ values) {
  const auto use = [&](int64_t i, int64_t range, unsigned byte) {
    if (i < ranges.numel) values[i] = range == kGap ? 0.0F : meaning_of(byte, i, scales[range]);
  };
  for_each_element(
      ranges, [&](int64_t i) { return static_cast<unsigned>(bits[i / 8]); }, use);
}

struct Term {
  float value;
  unsigned byte;
};

__global__ void add_signs_kernel(SignDeviceRanges ranges, const uint8_t* __restrict__ bits,
                                 const float* __restrict__ scales, float* __restrict__ values) {
  const auto use = [&](int64_t i, int64_t range, Term term) {
    if (range != kGap) values[i] = __fadd_rn(term.value, meaning_of(term.byte, i, scales[range]));
  };
  for_each_element(
      ranges,
      [&](int64_t i) {
        return Term{values[i], bits[i / 8]};
      },
      use);
}

// kernel(arguments...) with a block for each of `work`.
template <class... Parameters, class... Arguments>
const char* launch(int64_t work, void* stream, void (*kernel)(Parameters...), Arguments... arguments) {
  if (work == 0) return nullptr;
  const auto blocks = static_cast<unsigned>(std::min(work, kMostSignBlocks));
  kernel<<<blocks, kSignThreads, 0, static_cast<cudaStream_t>(stream)>>>(arguments...);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

int64_t tiles_of(const SignDeviceRanges& ranges) { return (ranges.numel + kSignTile - 1) / kSignTile; }

const char* launch_scales(const SignDeviceRanges& ranges, const float* values, double* sums, float* scales,
                          void* stream) {
  const char* error = launch(ranges.parts, stream, sum_parts_kernel, ranges, values, sums);
  return error != nullptr ? error : launch(ranges.count, stream, scales_kernel, ranges, sums, scales);
}

const char* launch_encode_signs(const SignDeviceRanges& ranges, float* values, const float* scales, uint8_t* bits,
                                void* stream) {
  return launch(tiles_of(ranges), stream, encode_signs_kernel, ranges, values, scales, bits);
}

const char* launch_decode_signs(const SignDeviceRanges& ranges, const uint8_t* bits, const float* scales, float* values,
                                void* stream) {
  return launch(tiles_of(ranges), stream, decode_signs_kernel, ranges, bits, scales, values);
}

const char* launch_add_signs(const SignDeviceRanges& ranges, const uint8_t* bits, const float* scales, float* values,
                             void* stream) {
  return launch(tiles_of(ranges), stream, add_signs_kernel, ranges, bits, scales, values);
}

constexpr SignDeviceKernels kCudaSignKernels{launch_scales, launch_encode_signs, launch_decode_signs, launch_add_signs};

const bool kSignsRegistered = (set_device_functions(&kCudaSignKernels), true);

}  // namespace
}  // namespace ds::compression
