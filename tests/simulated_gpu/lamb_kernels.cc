// The two passes of LAMB (optim/device_kernels.h) for the simulated GPU: the same rules, one element after the other.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "optim/device_kernels.h"
#include "optim/kernels/lamb_rules.h"
#include "tests/simulated_gpu/kernel_work.h"
#include "tests/simulated_gpu/update_kernels.h"

namespace ds::simulated_gpu {
namespace {

using optimizers::LambElement;
using optimizers::LambRun;
using optimizers::LambSums;
using optimizers::SliceArrays;
using optimizers::UpdateScale;

bool skipped(const UpdateScale& scale) { return scale.skip != nullptr && *scale.skip != 0.0F; }

int64_t tiles_of(const std::vector<LambRun>& runs) {
  int64_t tiles = 0;
  for (const LambRun& run : runs) tiles += optimizers::lamb_tiles(run.part.numel);
  return tiles;
}

void advance_run(const LambRun& run, float scale, double* tiles) {
  const SliceArrays& arrays = run.part.arrays;
  const LambElement rule(run.coefficients);
  for (int64_t begin = 0; begin < run.part.numel; begin += optimizers::kLambTile, tiles += 2) {
    tiles[0] = tiles[1] = 0;
    for (int64_t i = begin; i < std::min(run.part.numel, begin + optimizers::kLambTile); ++i) {
      float states[2] = {arrays.wide_state(0)[i], arrays.wide_state(1)[i]};
      rule.advance(value_at(arrays.gradient, arrays.gradient_type, i) * scale, states);
      const double u = rule.direction(arrays.wide_master()[i], states);
      tiles[0] += static_cast<double>(arrays.wide_master()[i]) * arrays.wide_master()[i];
      tiles[1] += u * u;
      arrays.wide_state(0)[i] = states[0];
      arrays.wide_state(1)[i] = states[1];
    }
  }
}

void apply_run(const LambRun& run, const double* sums) {
  const SliceArrays& arrays = run.part.arrays;
  const LambElement rule(run.coefficients);
  const float factor = optimizers::lamb_factor(run.coefficients, sums);
  for (int64_t i = 0; i < run.part.numel; ++i) {
    const float states[2] = {arrays.wide_state(0)[i], arrays.wide_state(1)[i]};
    arrays.wide_master()[i] = arrays.wide_master()[i] - rule.direction(arrays.wide_master()[i], states) * factor;
    if (arrays.copy != nullptr) put_value(arrays.copy, arrays.copy_type, i, arrays.wide_master()[i]);
  }
}

std::vector<Access> accesses_of_runs(const std::vector<LambRun>& runs, const UpdateScale& scale, bool advances) {
  std::vector<Access> accesses;
  for (const LambRun& run : runs) {
    const SliceArrays& arrays = run.part.arrays;
    const int64_t numel = run.part.numel;
    accesses.push_back(access_to(arrays.master, numel * 4, !advances));
    for (const int state : {0, 1}) accesses.push_back(access_to(arrays.states[state], numel * 4, advances));
    if (advances) {
      const int64_t bytes = numel * bytes_of(arrays.gradient_type);
      accesses.push_back(access_to(arrays.gradient, bytes, false));
    } else if (arrays.copy != nullptr) {
      accesses.push_back(access_to(arrays.copy, numel * bytes_of(arrays.copy_type), true));
    }
  }
  for (const float* scalar : {scale.device_factor, scale.skip}) {
    if (scalar != nullptr) accesses.push_back(access_to(scalar, 4, false));
  }
  return accesses;
}

}  // namespace

const char* give_lamb_advance(const LambRun* runs, int64_t count, const UpdateScale& scale, const LambSums& sums,
                              void* stream) {
  const std::vector<LambRun> taken(runs, runs + count);
  std::vector<Access> accesses = accesses_of_runs(taken, scale, /*advances=*/true);
  accesses.push_back(access_to(sums.tiles, tiles_of(taken) * 16, true));
  for (const LambRun& run : taken) accesses.push_back(access_to(sums.parameters + 2 * run.parameter, 16, true));
  return run_kernel(stream, "first pass of Lamb", accesses, [=] {
    if (skipped(scale)) return;
    const float factor = scale.device_factor == nullptr ? scale.factor : scale.factor * *scale.device_factor;
    double* tiles = sums.tiles;
    for (const LambRun& run : taken) {
      advance_run(run, factor, tiles);
      for (int64_t tile = 0; tile < optimizers::lamb_tiles(run.part.numel); ++tile, tiles += 2) {
        for (const int which : {0, 1}) sums.parameters[2 * run.parameter + which] += tiles[which];
      }
    }
  });
}

const char* give_lamb_apply(const LambRun* runs, int64_t count, const UpdateScale& scale, const LambSums& sums,
                            void* stream) {
  const std::vector<LambRun> taken(runs, runs + count);
  std::vector<Access> accesses = accesses_of_runs(taken, scale, /*advances=*/false);
  for (const LambRun& run : taken) accesses.push_back(access_to(sums.parameters + 2 * run.parameter, 16, false));
  return run_kernel(stream, "second pass of Lamb", accesses, [=] {
    if (skipped(scale)) return;
    for (const LambRun& run : taken) apply_run(run, sums.parameters + 2 * run.parameter);
  });
}

}  // namespace ds::simulated_gpu
