// Two trainings of one model, with an operator of ours and with LibTorch's in its place.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tests/model/small_run.h"

namespace ds::engine {

struct TrainedRun {
  std::vector<double> losses;
  State start, weights;
  int64_t skipped_steps = 0;
};

inline void expect_same_training(const TrainedRun& ours, const TrainedRun& theirs, double tolerance) {
  ASSERT_EQ(ours.losses.size(), theirs.losses.size());
  for (size_t i = 0; i < theirs.losses.size(); ++i) EXPECT_NEAR(ours.losses[i], theirs.losses[i], tolerance) << i;
  EXPECT_LE(largest_difference(ours.weights, theirs.weights), tolerance);
  EXPECT_GE(largest_difference(theirs.weights, theirs.start), 2.5 * tolerance) << "the weights move";
  EXPECT_EQ(ours.skipped_steps, 0);
  EXPECT_EQ(theirs.skipped_steps, 0);
}

}  // namespace ds::engine
