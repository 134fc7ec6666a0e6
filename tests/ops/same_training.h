// Two trainings of one model, with an operator of ours and with LibTorch's in its place.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "tests/model/small_run.h"

namespace ds::engine {

struct TrainedRun {
  std::vector<double> losses;
  State start, weights;
  int64_t skipped_steps = 0;
};

// Trains the engine's model on micro-batches 0, 1, ... `loss_of(micro_batch)` runs its forward.
inline TrainedRun record_training(Engine& engine, int64_t micro_batches,
                                  const std::function<at::Tensor(int64_t)>& loss_of) {
  TrainedRun run{.start = copy_of(engine.fp32_state_dict())};
  for (int64_t micro = 0; micro < micro_batches; ++micro) {
    const at::Tensor loss = loss_of(micro);
    engine.backward(loss);
    engine.step();
    run.losses.push_back(loss.item<double>());
  }
  run.weights = copy_of(engine.fp32_state_dict());
  run.skipped_steps = engine.skipped_steps();
  return run;
}

inline void expect_same_training(const TrainedRun& ours, const TrainedRun& theirs, double tolerance) {
  ASSERT_EQ(ours.losses.size(), theirs.losses.size());
  for (size_t i = 0; i < theirs.losses.size(); ++i) EXPECT_NEAR(ours.losses[i], theirs.losses[i], tolerance) << i;
  EXPECT_LE(largest_difference(ours.weights, theirs.weights), tolerance);
  EXPECT_GE(largest_difference(theirs.weights, theirs.start), 2.5 * tolerance) << "the weights move";
  EXPECT_EQ(ours.skipped_steps, 0);
  EXPECT_EQ(theirs.skipped_steps, 0);
}

}  // namespace ds::engine
