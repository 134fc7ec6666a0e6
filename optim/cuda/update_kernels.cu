// optim/device_kernels.h for CUDA. Compiled without fused multiply-adds of the compiler's own; registered when the
// library is loaded.
//
// An element of AdamW in bfloat16 moves 28 bytes, each once: gradient 2, master, mean and mean square read and written
// 24, new weight 2. A block takes tiles of all slices of a launch in turn; a thread loads kAtOnce times four elements
// of each array before it works on them.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "optim/cuda/lamb_kernels.h"
#include "optim/cuda/vector_access.h"
#include "optim/device_kernels.h"
#include "optim/kernels/element_rules.h"
#include "optim/kernels/muon_rules.h"

namespace ds::optimizers {
namespace {

constexpr int kThreads = 256;
constexpr int kAtOnce = 2;
constexpr int kTile = kThreads * kVector * kAtOnce * 2;
constexpr int kSlices = 20;  // of a launch: arguments of a kernel are limited to 4 KiB
constexpr int kBlocksOfAProcessor = 8;

template <class Coefficients>
struct Launch {
  DeviceSlice slices[kSlices];
  int64_t first_tiles[kSlices + 1];
  Coefficients coefficients[kSlices];
  UpdateScale scale;
  int count;
};
static_assert(sizeof(Launch<AdamCoefficients>) <= 4096, "arguments of a kernel");

template <bool kNarrow, class Rule>
__device__ void update_one(const Rule& rule, const SliceArrays& arrays, float scale, int64_t i) {
  float own[3] = {};
#pragma unroll
  for (int s = 0; s < Rule::kStates; ++s) {
    own[s] = load_kept<kNarrow, 1>(arrays.states[s], arrays.state_type, i).of[0];
  }
  float g = 0;
  with_format(arrays.gradient_type, [&](auto format) {
    using Format = decltype(format);
    g = Format::decode(static_cast<const typename Format::Bits*>(arrays.gradient)[i]);
  });
  const float before = load_kept<kNarrow, 1>(arrays.master, arrays.master_type, i).of[0];
  float w = rule(before, g * scale, own);
  store_kept<kNarrow>(arrays.master, arrays.master_type, i, Vector<float, 1>{{w}});
#pragma unroll
  for (int s = 0; s < Rule::kStates; ++s) {
    store_kept<kNarrow>(arrays.states[s], arrays.state_type, i, Vector<float, 1>{{own[s]}});
  }
  if (arrays.copy == nullptr) return;
  if (kNarrow) w = load_kept<kNarrow, 1>(arrays.master, arrays.master_type, i).of[0];  // as it was rounded
  with_format(arrays.copy_type, [&](auto format) {
    using Format = decltype(format);
    static_cast<typename Format::Bits*>(arrays.copy)[i] = Format::encode(w);
  });
}

// kAtOnce vectors of this thread, kThreads vectors apart.
template <bool kNarrow, class Rule>
__device__ void update_several(const Rule& rule, const SliceArrays& arrays, float scale, int64_t first) {
  Vector<float> w[kAtOnce];
  Vector<float> own[3][kAtOnce];
  Vector<float> g[kAtOnce];
#pragma unroll
  for (int k = 0; k < kAtOnce; ++k) {
    const int64_t i = first + int64_t{k} * kThreads * kVector;
    w[k] = load_kept<kNarrow>(arrays.master, arrays.master_type, i);
#pragma unroll
    for (int s = 0; s < Rule::kStates; ++s) own[s][k] = load_kept<kNarrow>(arrays.states[s], arrays.state_type, i);
    g[k] = load_decoded(arrays.gradient, arrays.gradient_type, i);
  }
#pragma unroll
  for (int k = 0; k < kAtOnce; ++k) {
    const int64_t i = first + int64_t{k} * kThreads * kVector;
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      float of_element[3] = {};
#pragma unroll
      for (int s = 0; s < Rule::kStates; ++s) of_element[s] = own[s][k].of[e];
      w[k].of[e] = rule(w[k].of[e], g[k].of[e] * scale, of_element);
#pragma unroll
      for (int s = 0; s < Rule::kStates; ++s) own[s][k].of[e] = of_element[s];
    }
    store_kept<kNarrow>(arrays.master, arrays.master_type, i, w[k]);
#pragma unroll
    for (int s = 0; s < Rule::kStates; ++s) store_kept<kNarrow>(arrays.states[s], arrays.state_type, i, own[s][k]);
    if (arrays.copy == nullptr) continue;
    if (kNarrow) w[k] = load_kept<kNarrow>(arrays.master, arrays.master_type, i);  // as it was rounded
    store_encoded(arrays.copy, arrays.copy_type, i, w[k]);
  }
}

template <bool kNarrow, class Rule>
__device__ void update_tile(const Rule& rule, const SliceArrays& arrays, float scale, int64_t begin, int64_t end) {
  int64_t i = begin;
  if (aligned(arrays)) {
    constexpr int64_t kRound = int64_t{kThreads} * kVector * kAtOnce;
    for (; i + kRound <= end; i += kRound) update_several<kNarrow>(rule, arrays, scale, i + threadIdx.x * kVector);
  }
  for (i += threadIdx.x; i < end; i += kThreads) update_one<kNarrow>(rule, arrays, scale, i);
}

template <class Rule, bool kNarrow>
__global__ void __launch_bounds__(kThreads)
    update_kernel(const __grid_constant__ Launch<typename Rule::Coefficients> launch) {
  if (launch.scale.skip != nullptr && *launch.scale.skip != 0.0F) return;
  const float scale =
      launch.scale.device_factor == nullptr ? launch.scale.factor : launch.scale.factor * *launch.scale.device_factor;
  int slice = 0;
  for (int64_t tile = blockIdx.x; tile < launch.first_tiles[launch.count]; tile += gridDim.x) {
    while (launch.first_tiles[slice + 1] <= tile) ++slice;
    const DeviceSlice& own = launch.slices[slice];
    const int64_t begin = (tile - launch.first_tiles[slice]) * kTile;
    update_tile<kNarrow>(Rule(launch.coefficients[slice]), own.arrays, scale, begin, min(own.numel, begin + kTile));
  }
}

template <class Rule>
const char* update(const DeviceSlice* slices, const typename Rule::Coefficients* coefficients, int64_t count,
                   const UpdateScale& scale, void* stream) {
  int64_t most_blocks = 0;
  cudaError_t error = find_blocks(kBlocksOfAProcessor, most_blocks);
  for (int64_t done = 0; done < count && error == cudaSuccess; done += kSlices) {
    Launch<typename Rule::Coefficients> launch{};
    launch.scale = scale;
    launch.count = static_cast<int>(std::min<int64_t>(kSlices, count - done));
    bool narrow = false;
    for (int i = 0; i < launch.count; ++i) {
      launch.slices[i] = slices[done + i];
      narrow = narrow || !slices[done + i].arrays.is_wide();
      launch.coefficients[i] = coefficients[done + i];
      launch.first_tiles[i + 1] = launch.first_tiles[i] + (slices[done + i].numel + kTile - 1) / kTile;
    }
    const int64_t tiles = launch.first_tiles[launch.count];
    if (tiles == 0) continue;
    const auto blocks = static_cast<unsigned>(std::min(tiles, most_blocks));
    const auto kernel = narrow ? update_kernel<Rule, true> : update_kernel<Rule, false>;
    kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(launch);
    error = cudaGetLastError();
  }
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

const char* update_adam(const DeviceSlice* slices, const AdamCoefficients* coefficients, int64_t count,
                        const UpdateScale& scale, void* stream) {
  const bool amsgrad = count > 0 && coefficients[0].amsgrad;
  return (amsgrad ? update<AdamElement<true>> : update<AdamElement<false>>)(slices, coefficients, count, scale, stream);
}

const char* update_sgd(const DeviceSlice* slices, const SgdCoefficients* coefficients, int64_t count,
                       const UpdateScale& scale, void* stream) {
  const bool momentum = count > 0 && slices[0].arrays.states[0] != nullptr;
  return (momentum ? update<SgdElement<true>> : update<SgdElement<false>>)(slices, coefficients, count, scale, stream);
}

constexpr UpdateDeviceKernels kCudaKernels{update_adam,
                                           update<LionElement>,
                                           update<AdagradElement>,
                                           update_sgd,
                                           update<MuonBlendElement>,
                                           update<MuonStepElement>,
                                           {advance_lamb_runs, apply_lamb_runs}};

const bool kRegistered = (set_device_functions(&kCudaKernels), true);

}  // namespace
}  // namespace ds::optimizers
