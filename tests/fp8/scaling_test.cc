// Delayed scaling against the recipe in plain words, over ranks, and through a checkpoint.
#include "fp8/scaling.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "dsengine/errors.h"
#include "tests/support/thread_ranks.h"

namespace ds::fp8 {
namespace {

using test::run_ranks;
using testing::HasSubstr;

at::Tensor tensor_with(float amax) { return torch::tensor({0.5F * amax, -amax, 0.0F}).view({1, 3}); }

// The scale that a tensor is quantised with.
float scale_of(Scaling& scaling, float amax, Kind kind, bool records = true) {
  const at::Tensor scales = scaling.scales(scaling.generation());
  return 1.0F / scaling.quantized(tensor_with(amax), 0, kind, scales, records).inverse.item<float>();
}

ScalingOptions delayed(int64_t history, bool most_recent = false) {
  return {.history = history, .most_recent = most_recent, .margin = 1};
}

TEST(Fp8Scaling, LooksBackAtTheStepsBefore) {
  for (const bool most_recent : {false, true}) {
    const std::vector<float> steps = {4, 8, 2, 1, 3, 16, 1};
    run_ranks(1, [&](comm::Communicator& ranks) {
      Scaling scaling(delayed(3, most_recent), {"a"}, c10::kCPU);
      for (size_t i = 0; i < steps.size(); ++i) {
        const size_t from = most_recent ? i - 1 : i < 3 ? 0 : i - 3;
        // The first one has no history: it is scaled by itself.
        const float amax = i == 0 ? steps[0] : *std::max_element(steps.begin() + from, steps.begin() + i);
        EXPECT_FLOAT_EQ(scale_of(scaling, steps[i], Kind::kInput), 448.0F / amax / 2.0F) << i;
        EXPECT_FLOAT_EQ(scale_of(scaling, steps[i], Kind::kGradient), 57344.0F / amax / 2.0F) << i;
        scale_of(scaling, steps[i] / 2, Kind::kInput);             // a second micro-batch
        scale_of(scaling, 1000, Kind::kInput, /*records=*/false);  // evaluation
        scaling.end_step(ranks);
      }
    });
  }
}

TEST(Fp8Scaling, CurrentScalingLooksAtTheTensorAtHand) {
  Scaling scaling({.recipe = Recipe::kCurrent}, {"a"}, c10::kCPU);
  for (const float amax : {4.0F, 8.0F, 0.25F}) {
    EXPECT_FLOAT_EQ(scale_of(scaling, amax, Kind::kInput), 448.0F / amax);
  }
}

TEST(Fp8Scaling, IsOneOnAllRanks) {
  run_ranks(3, [](comm::Communicator& ranks) {
    Scaling scaling(delayed(2), {"a"}, c10::kCPU);
    scale_of(scaling, static_cast<float>(1 + ranks.rank()), Kind::kWeight);
    scaling.end_step(ranks);
    EXPECT_FLOAT_EQ(scale_of(scaling, 100, Kind::kWeight), 448.0F / 3.0F / 2.0F);
  });
}

TEST(Fp8Scaling, StepsOfZerosAndOfInfinityKeepTheScale) {
  run_ranks(1, [](comm::Communicator& ranks) {
    Scaling scaling(delayed(1), {"a"}, c10::kCPU);
    scale_of(scaling, 4, Kind::kGradient);
    scaling.end_step(ranks);
    for (const float bad : {0.0F, std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
      scale_of(scaling, bad, Kind::kGradient);
      scaling.end_step(ranks);
      EXPECT_FLOAT_EQ(scale_of(scaling, 1, Kind::kGradient, /*records=*/false), 57344.0F / 4.0F / 2.0F);
    }
  });
}

// Forward is computed again with the scales that it had.
TEST(Fp8Scaling, KeepsTheScalesOfStepsBefore) {
  run_ranks(1, [](comm::Communicator& ranks) {
    Scaling scaling(delayed(1), {"a"}, c10::kCPU);
    std::vector<at::Tensor> expected;
    for (int64_t step = 0; step < 20; ++step) {
      EXPECT_EQ(scaling.generation(), step);
      expected.push_back(scaling.scales(step).clone());
      scale_of(scaling, static_cast<float>(step + 1), Kind::kInput);
      scaling.end_step(ranks);
    }
    EXPECT_TRUE(torch::equal(scaling.scales(15), expected[15]));
    try {
      scaling.scales(0);
      FAIL() << "expected an error";
    } catch (const UsageError& error) {
      EXPECT_THAT(error.what(), HasSubstr("call backward() sooner"));
    }
  });
}

TEST(Fp8Scaling, GoesOnFromACheckpoint) {
  run_ranks(1, [](comm::Communicator& ranks) {
    for (const int64_t history : {3, 5, 2}) {
      Scaling first(delayed(3), {"a"}, c10::kCPU);
      for (const float amax : {9.0F, 5.0F, 7.0F, 2.0F, 1.0F}) {
        scale_of(first, amax, Kind::kInput);
        first.end_step(ranks);
      }
      Scaling second(delayed(history), {"a"}, c10::kCPU);
      scale_of(second, 50, Kind::kInput);
      second.end_step(ranks);
      second.take(0, first.memory(0));
      for (const float amax : {1.0F, 0.5F, 0.25F}) {
        if (history == 3) {
          EXPECT_EQ(scale_of(first, amax, Kind::kInput), scale_of(second, amax, Kind::kInput));
        } else {
          scale_of(second, amax, Kind::kInput);
        }
        first.end_step(ranks);
        second.end_step(ranks);
      }
    }
  });
}

}  // namespace
}  // namespace ds::fp8
