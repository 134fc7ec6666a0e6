#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>

#include "dsengine/activation_checkpoint.h"
#include "dsengine/efficiency.h"
#include "dsengine/errors.h"

namespace ds::efficiency {
namespace {

using testing::HasSubstr;

TEST(ProgressiveLayerDrop, ThetaFallsFromOneToItsLimit) {
  TrainingState state;
  const ProgressiveLayerDrop drop(0.5, 0.001, 1, [&] { return state; });
  EXPECT_EQ(drop.theta(), 1);
  for (const int64_t step : {1, 100, 1000, 100000}) {
    state.optimizer_steps = step;
    EXPECT_DOUBLE_EQ(drop.theta(), 0.5 * std::exp(-0.001 * static_cast<double>(step)) + 0.5);
    for (int layer = 0; layer < 4; ++layer) {
      EXPECT_DOUBLE_EQ(drop.keep_probability(layer, 4), 1 - layer * (1 - drop.theta()) / 4);
    }
  }
  EXPECT_EQ(drop.keep_probability(0, 4), 1);
}

// Over many steps: layers are kept as often as they should be, and the mean of the result is the layer's.
TEST(ProgressiveLayerDrop, KeepsTheExpectation) {
  TrainingState state{.optimizer_steps = 0};
  ProgressiveLayerDrop drop(0.4, 1000, 7, [&] { return state; });
  constexpr int kSteps = 20000;
  constexpr int kLayers = 4;
  std::vector<int> kept(kLayers);
  std::vector<double> sum(kLayers);
  const at::Tensor x = at::full({1}, 3.0, at::kDouble);
  for (int step = 1; step <= kSteps; ++step) {
    state.optimizer_steps = step;
    for (int layer = 0; layer < kLayers; ++layer) {
      const at::Tensor out = drop(layer, kLayers, x, [&](const at::Tensor& h) {
        ++kept[layer];
        return h + 2.0;
      });
      sum[layer] += out.item<double>();
    }
  }
  for (int layer = 0; layer < kLayers; ++layer) {
    const double p = 1 - layer * 0.6 / kLayers;
    const double deviation = std::sqrt(p * (1 - p) / kSteps);
    EXPECT_NEAR(static_cast<double>(kept[layer]) / kSteps, p, 4 * deviation) << "layer " << layer;
    EXPECT_NEAR(sum[layer] / kSteps, 5.0, 2.0 * 4 * deviation / p + 1e-12) << "layer " << layer;
  }
}

TEST(ProgressiveLayerDrop, ScalesWhatALayerChanges) {
  ProgressiveLayerDrop drop(0.5, 1000, 3, [] { return TrainingState{.optimizer_steps = 10}; });
  const at::Tensor x = at::rand({2, 3}, at::kDouble).requires_grad_();
  const double p = 1 - 0.5 / 2;
  int ran = 0;
  for (int i = 0; i < 20; ++i) {
    bool kept = false;
    const at::Tensor out = drop(1, 2, x, [&](const at::Tensor& h) {
      kept = true;
      return h + h.square();
    });
    EXPECT_TRUE(at::allclose(out, kept ? x + x.square() / p : x, 0, 1e-15));
    ran += kept;
  }
  EXPECT_GT(ran, 0);
  EXPECT_LT(ran, 20);
}

TEST(ProgressiveLayerDrop, EvaluationRunsEveryLayerAsItIs) {
  ProgressiveLayerDrop drop(0.01, 1000, 3, [] { return TrainingState{.optimizer_steps = 10, .training = false}; });
  const at::Tensor x = at::rand({2, 3});
  for (int i = 0; i < 10; ++i) {
    EXPECT_TRUE(at::equal(drop(3, 4, x, [](const at::Tensor& h) { return h + 1; }), x + 1));
  }
}

// The decisions of a step: of rank A, of rank B with other draws of its own in between, of a resumed run.
TEST(ProgressiveLayerDrop, DecidesAlikeOnAllRanksAndInAResumedRun) {
  const auto decisions = [](uint64_t seed) {
    TrainingState state;
    ProgressiveLayerDrop drop(0.5, 1000, seed, [&] { return state; });
    std::vector<bool> result;
    for (state.optimizer_steps = 5; state.optimizer_steps < 30; ++state.optimizer_steps) {
      for (int micro_batch = 0; micro_batch < 2; ++micro_batch) {
        at::rand({3});
        for (int layer = 0; layer < 6; ++layer) {
          bool kept = false;
          drop(layer, 6, at::zeros({1}), [&](const at::Tensor& h) {
            kept = true;
            return h;
          });
          result.push_back(kept);
        }
      }
    }
    return result;
  };
  const std::vector<bool> one = decisions(11);
  EXPECT_EQ(one, decisions(11));
  EXPECT_NE(one, decisions(12));
}

// The decision inside of a region that is computed again, after others were made.
TEST(ProgressiveLayerDrop, ARecomputationDecidesAsTheFirstRun) {
  ProgressiveLayerDrop drop(0.2, 1000, 5, [] { return TrainingState{.optimizer_steps = 10}; });
  const at::Tensor weight = at::rand({4}, at::kDouble).requires_grad_();
  int kept = 0;
  for (int i = 0; i < 40; ++i) {
    const at::Tensor x = at::rand({4}, at::kDouble).requires_grad_();
    bool ran = false;
    const at::Tensor out = recompute::checkpoint(
        [&, weight](const at::Tensor& input) {
          return drop(3, 4, input, [&](const at::Tensor& h) {
            ran = true;
            return h + h * weight;
          });
        },
        x);
    kept += ran;
    const double p = drop.keep_probability(3, 4);
    const at::Tensor expected = ran ? 1 + weight / p : at::ones({4}, at::kDouble);
    drop(3, 4, x.detach(), [](const at::Tensor& h) { return h; });  // another draw in between
    out.sum().backward();
    EXPECT_TRUE(at::allclose(x.grad(), expected, 0, 1e-12)) << i;
  }
  EXPECT_GT(kept, 0);
  EXPECT_LT(kept, 40);
}

// The program has looked at its model in between, or gone on to the next step.
TEST(ProgressiveLayerDrop, ARecomputationIsOfTheModeAndStepOfTheFirstRun) {
  TrainingState state{.optimizer_steps = 10};
  ProgressiveLayerDrop drop(0.2, 0.01, 5, [&] { return state; });
  const at::Tensor weight = at::rand({4}, at::kDouble).requires_grad_();
  const at::Tensor x = at::rand({4}, at::kDouble).requires_grad_();
  const double p = drop.keep_probability(1, 4);
  bool ran = false;
  at::Tensor out;
  while (!ran) {
    out = recompute::checkpoint(
        [&, weight](const at::Tensor& input) {
          return drop(1, 4, input, [&](const at::Tensor& h) {
            ran = true;
            return h + h * weight;
          });
        },
        x);
  }
  state = {.optimizer_steps = 500, .training = false, .accumulation = 7};
  out.sum().backward();
  EXPECT_TRUE(at::allclose(x.grad(), 1 + weight / p, 0, 1e-12));
}

// Decisions of forty layers: micro-batches do not agree by chance.
std::vector<bool> decisions_of(ProgressiveLayerDrop& drop) {
  std::vector<bool> result;
  for (int layer = 0; layer < 40; ++layer) {
    bool kept = false;
    drop(layer, 40, at::zeros({1}), [&](const at::Tensor& h) {
      kept = true;
      return h;
    });
    result.push_back(kept);
  }
  return result;
}

TEST(ProgressiveLayerDrop, WhatIsUndoneOrLookedAtIsNotCounted) {
  TrainingState state{.optimizer_steps = 10};
  ProgressiveLayerDrop drop(0.2, 1000, 5, [&] { return state; });
  const std::vector<bool> first = decisions_of(drop);
  const std::vector<bool> second = decisions_of(drop);
  EXPECT_NE(first, second) << "micro-batches draw by themselves";
  state.accumulation = 1;  // the first one was undone
  EXPECT_EQ(decisions_of(drop), first);
  {
    const at::NoGradGuard look;
    decisions_of(drop);
  }
  EXPECT_EQ(decisions_of(drop), second);
}

TEST(ProgressiveLayerDrop, AThetaOfOneAsksForNothing) {
  ProgressiveLayerDrop drop(1, 0.1, 1, []() -> TrainingState { throw std::runtime_error("asked"); });
  EXPECT_EQ(drop(3, 4, at::zeros({2, 3}), [](const at::Tensor& h) { return h.sum(); }).dim(), 0);
}

TEST(ProgressiveLayerDrop, WhatCannotBeIsNamed) {
  const auto state = [] { return TrainingState{.optimizer_steps = 1}; };
  EXPECT_THROW(ProgressiveLayerDrop(0, 0.1, 1, state), UsageError);
  EXPECT_THROW(ProgressiveLayerDrop(1.5, 0.1, 1, state), UsageError);
  EXPECT_THROW(ProgressiveLayerDrop(0.5, -1, 1, state), UsageError);
  ProgressiveLayerDrop drop(0.5, 0.1, 1, state);
  const auto same = [](const at::Tensor& h) { return h; };
  EXPECT_THROW(drop(4, 4, at::zeros({1}), same), UsageError);
  try {
    drop(0, 4, at::zeros({2, 3}), [](const at::Tensor& h) { return h.sum(); });
    FAIL();
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), HasSubstr("layer 0: expected a result of its input's shape"));
  }
}

}  // namespace
}  // namespace ds::efficiency
