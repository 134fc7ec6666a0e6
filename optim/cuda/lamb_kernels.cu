// The two passes of LAMB over all runs of a launch. Compiled without fused multiply-adds of the compiler's own.
//
// The first pass reads gradient, weight and means and writes the means; a block adds up the squares of a tile in a
// tree, and a block of a third kernel those of a parameter's tiles, so that sums do not depend on which block came
// first. The second pass makes the step again from the means, which is less traffic than a step that is kept.
#include "optim/cuda/lamb_kernels.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "optim/cuda/vector_access.h"

namespace ds::optimizers {
namespace {

constexpr int kLambThreads = 256;
constexpr int kRuns = 20;  // of a launch: arguments of a kernel are limited to 4 KiB
constexpr int kLambBlocksOfAProcessor = 8;

struct LambLaunch {
  LambRun runs[kRuns];
  int64_t first_tiles[kRuns + 1];
  UpdateScale scale;
  LambSums sums;  // tiles: from those of the launch on
  int count;
};
static_assert(sizeof(LambLaunch) <= 4096, "arguments of a kernel");

struct Squares {
  double weights = 0;
  double steps = 0;
};

__device__ bool skips(const UpdateScale& scale) { return scale.skip != nullptr && *scale.skip != 0.0F; }

// The sum over the block's threads, for the first of them.
__device__ Squares added_over_block(const Squares& own) {
  __shared__ double weights[kLambThreads];
  __shared__ double steps[kLambThreads];
  weights[threadIdx.x] = own.weights;
  steps[threadIdx.x] = own.steps;
  __syncthreads();
  for (int half = kLambThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) {
      weights[threadIdx.x] += weights[threadIdx.x + half];
      steps[threadIdx.x] += steps[threadIdx.x + half];
    }
    __syncthreads();
  }
  Squares sum;
  sum.weights = weights[0];
  sum.steps = steps[0];
  __syncthreads();  // before the next use
  return sum;
}

template <int kCount>
__device__ void advance_pack(const LambElement& rule, const SliceArrays& arrays, float scale, int64_t i,
                             Squares& squares) {
  const Vector<float, kCount> w = load<kCount>(arrays.wide_master() + i);
  const Vector<float, kCount> g = load_decoded<kCount>(arrays.gradient, arrays.gradient_type, i);
  Vector<float, kCount> mean = load<kCount>(arrays.wide_state(0) + i);
  Vector<float, kCount> square = load<kCount>(arrays.wide_state(1) + i);
#pragma unroll
  for (int e = 0; e < kCount; ++e) {
    float states[2] = {mean.of[e], square.of[e]};
    rule.advance(g.of[e] * scale, states);
    const double u = rule.direction(w.of[e], states);
    const double weight = w.of[e];
    squares.weights += weight * weight;
    squares.steps += u * u;
    mean.of[e] = states[0];
    square.of[e] = states[1];
  }
  store(arrays.wide_state(0) + i, mean);
  store(arrays.wide_state(1) + i, square);
}

template <int kCount>
__device__ void apply_pack(const LambElement& rule, const SliceArrays& arrays, float factor, int64_t i) {
  Vector<float, kCount> w = load<kCount>(arrays.wide_master() + i);
  const Vector<float, kCount> mean = load<kCount>(arrays.wide_state(0) + i);
  const Vector<float, kCount> square = load<kCount>(arrays.wide_state(1) + i);
#pragma unroll
  for (int e = 0; e < kCount; ++e) {
    const float states[2] = {mean.of[e], square.of[e]};
    w.of[e] = w.of[e] - rule.direction(w.of[e], states) * factor;
  }
  store(arrays.wide_master() + i, w);
  if (arrays.copy != nullptr) store_encoded(arrays.copy, arrays.copy_type, i, w);
}

// use(run, begin, end, tile) for the tiles of this block.
template <class Use>
__device__ void for_each_tile(const LambLaunch& launch, const Use& use) {
  int run = 0;
  for (int64_t tile = blockIdx.x; tile < launch.first_tiles[launch.count]; tile += gridDim.x) {
    while (launch.first_tiles[run + 1] <= tile) ++run;
    const int64_t begin = (tile - launch.first_tiles[run]) * kLambTile;
    use(launch.runs[run], begin, min(launch.runs[run].part.numel, begin + kLambTile), tile);
  }
}

__global__ void __launch_bounds__(kLambThreads) advance_kernel(const __grid_constant__ LambLaunch launch) {
  if (skips(launch.scale)) return;
  const float scale =
      launch.scale.device_factor == nullptr ? launch.scale.factor : launch.scale.factor * *launch.scale.device_factor;
  for_each_tile(launch, [&](const LambRun& run, int64_t begin, int64_t end, int64_t tile) {
    const SliceArrays& arrays = run.part.arrays;
    const LambElement rule(run.coefficients);
    Squares own;
    int64_t i = begin;
    if (aligned(arrays)) {
      constexpr int64_t kRound = int64_t{kLambThreads} * kVector;
      for (; i + kRound <= end; i += kRound) {
        advance_pack<kVector>(rule, arrays, scale, i + int64_t{threadIdx.x} * kVector, own);
      }
    }
    for (i += threadIdx.x; i < end; i += kLambThreads) advance_pack<1>(rule, arrays, scale, i, own);
    const Squares sum = added_over_block(own);
    if (threadIdx.x != 0) return;
    launch.sums.tiles[2 * tile] = sum.weights;
    launch.sums.tiles[2 * tile + 1] = sum.steps;
  });
}

// A block for each run; the first of a parameter's adds up the tiles of all of them.
__global__ void __launch_bounds__(kLambThreads) add_tiles_kernel(const __grid_constant__ LambLaunch launch) {
  if (skips(launch.scale)) return;
  const int first = static_cast<int>(blockIdx.x);
  const int64_t parameter = launch.runs[first].parameter;
  for (int before = 0; before < first; ++before) {
    if (launch.runs[before].parameter == parameter) return;
  }
  Squares own;
  for (int run = first; run < launch.count; ++run) {
    if (launch.runs[run].parameter != parameter) continue;
    for (int64_t tile = launch.first_tiles[run] + threadIdx.x; tile < launch.first_tiles[run + 1];
         tile += kLambThreads) {
      own.weights += launch.sums.tiles[2 * tile];
      own.steps += launch.sums.tiles[2 * tile + 1];
    }
  }
  const Squares sum = added_over_block(own);
  if (threadIdx.x != 0) return;
  launch.sums.parameters[2 * parameter] += sum.weights;
  launch.sums.parameters[2 * parameter + 1] += sum.steps;
}

__global__ void __launch_bounds__(kLambThreads) apply_kernel(const __grid_constant__ LambLaunch launch) {
  if (skips(launch.scale)) return;
  for_each_tile(launch, [&](const LambRun& run, int64_t begin, int64_t end, int64_t) {
    const SliceArrays& arrays = run.part.arrays;
    const LambElement rule(run.coefficients);
    const float factor = lamb_factor(run.coefficients, launch.sums.parameters + 2 * run.parameter);
    int64_t i = begin;
    if (aligned(arrays)) {
      constexpr int64_t kRound = int64_t{kLambThreads} * kVector;
      for (; i + kRound <= end; i += kRound) {
        apply_pack<kVector>(rule, arrays, factor, i + int64_t{threadIdx.x} * kVector);
      }
    }
    for (i += threadIdx.x; i < end; i += kLambThreads) apply_pack<1>(rule, arrays, factor, i);
  });
}

// give(launch, blocks) for every so many runs.
template <class Give>
const char* launch_all(const LambRun* runs, int64_t count, const UpdateScale& scale, LambSums sums, const Give& give) {
  int64_t most_blocks = 0;
  cudaError_t error = find_blocks(kLambBlocksOfAProcessor, most_blocks);
  for (int64_t done = 0; done < count && error == cudaSuccess; done += kRuns) {
    LambLaunch launch{};
    launch.scale = scale;
    launch.sums = sums;
    launch.count = static_cast<int>(std::min<int64_t>(kRuns, count - done));
    for (int i = 0; i < launch.count; ++i) {
      launch.runs[i] = runs[done + i];
      launch.first_tiles[i + 1] = launch.first_tiles[i] + lamb_tiles(runs[done + i].part.numel);
    }
    const int64_t tiles = launch.first_tiles[launch.count];
    if (tiles == 0) continue;
    give(launch, static_cast<unsigned>(std::min(tiles, most_blocks)));
    error = cudaGetLastError();
    sums.tiles += 2 * tiles;
  }
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace

const char* advance_lamb_runs(const LambRun* runs, int64_t count, const UpdateScale& scale, const LambSums& sums,
                              void* stream) {
  auto* const on = static_cast<cudaStream_t>(stream);
  return launch_all(runs, count, scale, sums, [&](const LambLaunch& launch, unsigned blocks) {
    advance_kernel<<<blocks, kLambThreads, 0, on>>>(launch);
    add_tiles_kernel<<<static_cast<unsigned>(launch.count), kLambThreads, 0, on>>>(launch);
  });
}

const char* apply_lamb_runs(const LambRun* runs, int64_t count, const UpdateScale& scale, const LambSums& sums,
                            void* stream) {
  auto* const on = static_cast<cudaStream_t>(stream);
  return launch_all(runs, count, scale, sums, [&](const LambLaunch& launch, unsigned blocks) {
    apply_kernel<<<blocks, kLambThreads, 0, on>>>(launch);
  });
}

}  // namespace ds::optimizers
