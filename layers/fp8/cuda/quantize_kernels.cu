// layers/fp8/quantize_device_kernels.h for CUDA, by the rules of layers/fp8/quantize_rules.h: a tensor in one pass
// where its stored scale is good, in two where it is not, rows and blocks in one. Compiled without fused multiply-adds
// of the compiler's own; registered when the library is loaded.
#include "layers/fp8/quantize_device_kernels.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "core/cuda/warp_team.h"

namespace ds::fp8 {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpLanes;
constexpr int64_t kMostBlocks = 1 << 12;  // of a tensor: each ends with an atomic operation on one place
constexpr int64_t kMostParts = 1 << 16;   // more: blocks take several turns
constexpr int kSide = 128;                // of a square that is transposed
constexpr int kSideWords = kSide / 4;

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

// The threads of a block, as core/numbers/block_rules.h says.
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

// use(pack, i) for packs of kPack elements, and for those that are left one by one; a thread's are apart.
template <int kPack, class Use>
__device__ void for_each_pack(int64_t numel, const Use& use) {
  const int64_t first = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t step = int64_t{gridDim.x} * kThreads;
  const int64_t packs = numel / kPack;
#pragma unroll 4
  for (int64_t i = first; i < packs; i += step) use(std::integral_constant<int, kPack>(), i);
  if constexpr (kPack > 1) {
    for (int64_t i = packs * kPack + first; i < numel; i += step) use(std::integral_constant<int, 1>(), i);
  }
}

template <class Format, class To, int kPack>
__global__ void __launch_bounds__(kThreads) measure_kernel(QuantizeArrays arrays, WholeTensor whole) {
  const WholeQuantizeRule<Format, To> rule(arrays, whole);
  int32_t most = 0;
  for_each_pack<kPack>(
      whole.numel, [&](auto pack, int64_t i) { most = max(most, rule.template measure<decltype(pack)::value>(i)); });
  most = largest_of_block(most);
  if (threadIdx.x == 0) atomicMax(whole.amax, most);
}

template <class Format, class To, int kPack>
__global__ void __launch_bounds__(kThreads) settle_kernel(QuantizeArrays arrays, WholeTensor whole) {
  const WholeQuantizeRule<Format, To> rule(arrays, whole);
  const float amax = float_of_bits(static_cast<uint32_t>(*whole.amax));
  const float scale = rule.scale(amax);
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    *arrays.inverse = inverse_of_scale(scale, amax);
    record_amax(whole.record, amax);
  }
  if (rule.stored_is_good(amax)) return;
  for_each_pack<kPack>(whole.numel,
                       [&](auto pack, int64_t i) { rule.template settle<decltype(pack)::value>(i, scale); });
}

// Squares of kSide x kSide bytes by way of shared memory, four bytes of a row at a time, which `words` allows.
__global__ void __launch_bounds__(kThreads)
    transpose_kernel(const uint8_t* from, int64_t rows, int64_t columns, uint8_t* to, bool words) {
  __shared__ uint32_t square[kSide][kSideWords + 1];  // a row's words lie in other banks than the next one's
  const int64_t across = (columns + kSide - 1) / kSide;
  const int64_t squares = (rows + kSide - 1) / kSide * across;
  for (int64_t at = blockIdx.x; at < squares; at += gridDim.x) {
    const int64_t row = at / across * kSide;
    const int64_t column = at % across * kSide;
    if (!words) {
      for (int64_t i = threadIdx.x; i < kSide * kSide; i += kThreads) {
        const int64_t r = row + i / kSide;
        const int64_t c = column + i % kSide;
        if (r < rows && c < columns) to[c * rows + r] = from[r * columns + c];
      }
      continue;
    }
    for (int i = threadIdx.x; i < kSide * kSideWords; i += kThreads) {
      const int64_t r = row + i / kSideWords;
      const int64_t c = column + i % kSideWords * 4;
      if (r < rows && c < columns) {
        square[i / kSideWords][i % kSideWords] = *reinterpret_cast<const uint32_t*>(from + r * columns + c);
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kSide * kSideWords; i += kThreads) {
      // A warp has 32 rows of 4 columns whose bytes are in one word: no two of its words are in one bank.
      const int warp = i / kWarpLanes;
      const int r = (i % 8 + warp % 4 * 8) * 4;
      const int c = i % kWarpLanes / 8 + warp / 4 * 4;
      if (row + r >= rows || column + c >= columns) continue;
      uint32_t word = 0;
#pragma unroll
      for (int k = 0; k < 4; ++k) word |= (square[r + k][c / 4] >> (c % 4 * 8) & 0xFFU) << (k * 8);
      *reinterpret_cast<uint32_t*>(to + (column + c) * rows + row + r) = word;
    }
    __syncthreads();  // before the next square
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
  with_formats(arrays, [&](auto from, auto to) {
    using Format = decltype(from);
    using To = decltype(to);
    const auto give = [&](auto pack) {
      constexpr int kPack = decltype(pack)::value;
      constexpr int64_t kOfABlock = int64_t{4} * kThreads * kPack;
      const auto blocks =
          static_cast<unsigned>(std::clamp<int64_t>((whole.numel + kOfABlock - 1) / kOfABlock, 1, kMostBlocks));
      measure_kernel<Format, To, kPack><<<blocks, kThreads, 0, stream>>>(arrays, whole);
      settle_kernel<Format, To, kPack><<<blocks, kThreads, 0, stream>>>(arrays, whole);
    };
    constexpr int kWhole = kWholePack<Format>;
    if (WholeQuantizeRule<Format, To>::template packs_fit<kWhole>(arrays)) {
      give(std::integral_constant<int, kWhole>());
    } else {
      give(std::integral_constant<int, 1>());
    }
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

const char* transpose(const uint8_t* from, int64_t rows, int64_t columns, uint8_t* to, void* handle) {
  const int64_t squares = (rows + kSide - 1) / kSide * ((columns + kSide - 1) / kSide);
  if (squares == 0) return nullptr;
  const bool words = rows % 4 == 0 && columns % 4 == 0 && packs_lie_aligned(from, 4, 1) && packs_lie_aligned(to, 4, 1);
  transpose_kernel<<<static_cast<unsigned>(std::min(squares, kMostParts)), kThreads, 0,
                     static_cast<cudaStream_t>(handle)>>>(from, rows, columns, to, words);
  return text_of(cudaGetLastError());
}

constexpr QuantizeDeviceKernels kCudaQuantize{quantize_whole, quantize_matrix_parts, transpose};

const bool kQuantizeRegistered = (set_device_functions(&kCudaQuantize), true);

}  // namespace
}  // namespace ds::fp8
