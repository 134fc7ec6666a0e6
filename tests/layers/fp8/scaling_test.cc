// Delayed scaling against the recipe in plain words, over ranks, and through a checkpoint.
#include "layers/fp8/scaling.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "dsengine/errors.h"
#include "tests/support/borrowed.h"
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

// Rank 1 has the largest element of a weight in two parts; its scale fits the first part alone once it has grown.
TEST(Fp8Scaling, PartsOfAWeightHaveTheScaleOfTheFullOne) {
  run_ranks(2, [](comm::Communicator& ranks) {
    Scaling scaling(delayed(3), {"a"}, c10::kCPU);
    scaling.share_parts(test::borrowed(ranks), {1});
    const auto of_part = [&](float first, float second) {
      return scale_of(scaling, ranks.rank() == 0 ? first : second, Kind::kWeight);
    };
    EXPECT_FLOAT_EQ(of_part(2, 4), 448.0F / 4 / 2) << "without a history";
    scaling.end_step(ranks);
    EXPECT_FLOAT_EQ(of_part(3, 8), 448.0F / 4 / 2) << "the history takes twice its largest: margin 1";
    scaling.end_step(ranks);
    ranks.reset_counters();
    EXPECT_FLOAT_EQ(of_part(4, 32), 448.0F / 32 / 2) << "the first part alone fits the history";
    const int64_t calls = ranks.counters().calls[static_cast<size_t>(comm::CollectiveKind::kAllReduce)];
    EXPECT_EQ(calls, 1);
    EXPECT_FLOAT_EQ(of_part(4, 32), 448.0F / 32 / 2);
    EXPECT_EQ(ranks.counters().calls[static_cast<size_t>(comm::CollectiveKind::kAllReduce)], calls) << "once a step";
    scaling.forget();
    EXPECT_FLOAT_EQ(of_part(1, 2), 448.0F / 2 / 2) << "weights from elsewhere";
  });
}

TEST(Fp8Scaling, WithoutLayersNothingHappensInAStep) {
  run_ranks(2, [](comm::Communicator& ranks) {
    const std::shared_ptr<Scaling> scaling = scaling_without_layers();
    EXPECT_TRUE(scaling->layers().empty());
    if (ranks.rank() == 0) scaling->end_step(ranks);  // no collective: the other rank takes part in none
    scaling->take_back_step();
    scaling->drop_step();
    scaling->gradients_scaled(2.0);
    scaling->gradients_scaled(torch::full({1}, 2.0F));
    scaling->forget();
  });
}

TEST(Fp8Scaling, IsOneOnAllRanks) {
  run_ranks(3, [](comm::Communicator& ranks) {
    Scaling scaling(delayed(2), {"a"}, c10::kCPU);
    scale_of(scaling, static_cast<float>(1 + ranks.rank()), Kind::kWeight);
    scaling.end_step(ranks);
    EXPECT_FLOAT_EQ(scale_of(scaling, 2, Kind::kWeight), 448.0F / 3.0F / 2.0F);
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

// Two models: one drops what the other skips by a flag of the device, and takes back later.
TEST(Fp8Scaling, AStepThatIsSkippedLeavesNoTrace) {
  for (const bool most_recent : {false, true}) {
    run_ranks(2, [&](comm::Communicator& ranks) {
      Scaling dropped(delayed(3, most_recent), {"a"}, c10::kCPU);
      Scaling skipped(delayed(3, most_recent), {"a"}, c10::kCPU);
      const std::vector<float> steps = {4, 8, 0.5F, 2, 1, 1, 1};
      for (size_t i = 0; i < steps.size(); ++i) {
        const bool bad = i == 1 || i == 4;
        EXPECT_EQ(scale_of(dropped, steps[i], Kind::kInput), scale_of(skipped, steps[i], Kind::kInput)) << i;
        if (bad) {
          dropped.drop_step();
        } else {
          dropped.end_step(ranks);
        }
        skipped.end_step(ranks, torch::full({1}, bad ? 1.0F : 0.0F));
        const at::Tensor scales = skipped.scales(skipped.generation());
        EXPECT_TRUE(torch::equal(scales, dropped.scales(dropped.generation()))) << "before the host knows, " << i;
        if (bad) skipped.take_back_step();
        EXPECT_TRUE(torch::equal(skipped.memory(0), dropped.memory(0))) << i;
      }
    });
  }
}

TEST(Fp8Scaling, FollowsTheLossScale) {
  run_ranks(1, [](comm::Communicator& ranks) {
    Scaling scaling(delayed(2), {"a"}, c10::kCPU);
    for (const Kind kind : {Kind::kInput, Kind::kGradient}) scale_of(scaling, 4, kind);
    scaling.end_step(ranks);
    const at::Tensor of_graph = scaling.scales(scaling.generation());
    scaling.gradients_scaled(2.0);
    EXPECT_FLOAT_EQ(scale_of(scaling, 1, Kind::kGradient, /*records=*/false), 57344.0F / 8.0F / 2.0F);
    EXPECT_FLOAT_EQ(scale_of(scaling, 1, Kind::kInput, /*records=*/false), 448.0F / 4.0F / 2.0F);
    EXPECT_FLOAT_EQ(of_graph[0][2].item<float>(), 57344.0F / 4.0F / 2.0F) << "what a graph has is as it was";
    scale_of(scaling, 6, Kind::kGradient);
    scaling.end_step(ranks);
    EXPECT_FLOAT_EQ(scale_of(scaling, 1, Kind::kGradient), 57344.0F / 8.0F / 2.0F) << "the history follows";
  });
}

// Of a program that has changed it: what is known is not cut off.
TEST(Fp8Scaling, AWeightBeyondItsScaleIsScaledByItself) {
  run_ranks(1, [](comm::Communicator& ranks) {
    Scaling scaling(delayed(2), {"a"}, c10::kCPU);
    for (const Kind kind : {Kind::kInput, Kind::kWeight}) scale_of(scaling, 1, kind);
    scaling.end_step(ranks);
    EXPECT_FLOAT_EQ(scale_of(scaling, 2, Kind::kWeight, /*records=*/false), 448.0F / 1.0F / 2.0F) << "the margin";
    EXPECT_FLOAT_EQ(scale_of(scaling, 100, Kind::kWeight, /*records=*/false), 448.0F / 100.0F / 2.0F);
    EXPECT_FLOAT_EQ(scale_of(scaling, 100, Kind::kInput, /*records=*/false), 448.0F / 1.0F / 2.0F);
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

// The scale that is in force comes with it; then as many of its last three steps (7, 2, 1) count as the history has.
TEST(Fp8Scaling, GoesOnFromACheckpoint) {
  const std::vector<std::pair<int64_t, std::vector<float>>> expected = {
      {3, {7, 2, 1, 1}}, {5, {7, 7, 7, 2}}, {2, {7, 1, 1, 0.5F}}};
  run_ranks(1, [&](comm::Communicator& ranks) {
    for (const auto& [history, largest] : expected) {
      Scaling first(delayed(3), {"a"}, c10::kCPU);
      for (const float amax : {9.0F, 5.0F, 7.0F, 2.0F, 1.0F}) {
        scale_of(first, amax, Kind::kInput);
        first.end_step(ranks);
      }
      Scaling second(delayed(history), {"a"}, c10::kCPU);
      scale_of(second, 50, Kind::kInput);
      second.end_step(ranks);
      second.take(0, first.memory(0));
      const std::vector<float> steps = {1.0F, 0.5F, 0.25F, 0.25F};
      for (size_t i = 0; i < steps.size(); ++i) {
        const float found = scale_of(second, steps[i], Kind::kInput);
        EXPECT_FLOAT_EQ(found, 448.0F / largest[i] / 2.0F) << "history " << history << ", step " << i;
        if (history == 3) EXPECT_EQ(found, scale_of(first, steps[i], Kind::kInput)) << "step " << i;
        first.end_step(ranks);
        second.end_step(ranks);
      }
    }
  });
}

}  // namespace
}  // namespace ds::fp8
