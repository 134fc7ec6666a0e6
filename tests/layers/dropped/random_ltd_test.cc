#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "dsengine/activation_checkpoint.h"
#include "dsengine/efficiency.h"
#include "dsengine/errors.h"

namespace ds::efficiency {
namespace {

RandomLtdOptions options_of(int64_t kept, int64_t sequence_dim = 1) {
  return {.layers = {1, 2},
          .kept = {.min_difficulty = kept, .max_difficulty = 64, .total_curriculum_step = 1000000},
          .sequence_dim = sequence_dim};
}

TrainingState step_three() { return {.optimizer_steps = 3}; }

// The layer sees the tokens at its positions; the others pass by.
TEST(RandomLtd, ALayerRunsOnItsTokensAlone) {
  for (const int64_t sequence_dim : {1, 0}) {
    RandomLtd drop(options_of(5, sequence_dim), 9, 0, step_three);
    const at::Tensor whole = at::rand({3, 12, 4}, at::kDouble);
    const at::Tensor x = (sequence_dim == 1 ? whole : whole.transpose(0, 1).contiguous()).requires_grad_();
    at::Tensor positions;
    const at::Tensor out = drop(1, x, [&](const at::Tensor& tokens, const at::Tensor& where) {
      positions = where;
      return tokens.square();
    });
    ASSERT_EQ(positions.sizes(), at::IntArrayRef({3, 5}));
    EXPECT_TRUE((positions.slice(1, 1) > positions.slice(1, 0, 4)).all().item<bool>()) << "in order, each once";
    at::Tensor runs = at::zeros({3, 12}, at::kBool);
    runs.scatter_(1, positions, true);
    runs = runs.unsqueeze(2);
    const at::Tensor shown = sequence_dim == 1 ? out : out.transpose(0, 1);
    EXPECT_TRUE(at::equal(shown, at::where(runs, whole.square(), whole)));
    out.sum().backward();
    const at::Tensor gradient = sequence_dim == 1 ? x.grad() : x.grad().transpose(0, 1);
    EXPECT_TRUE(at::equal(gradient, at::where(runs, 2 * whole, at::ones_like(whole))));
  }
}

TEST(RandomLtd, RunsWholeWhereNothingIsDropped) {
  TrainingState state{.optimizer_steps = 3};
  RandomLtd drop(options_of(5), 9, 0, [&] { return state; });
  const at::Tensor x = at::rand({2, 12, 4});
  const auto whole = [&](const at::Tensor& tokens, const at::Tensor& positions) {
    EXPECT_FALSE(positions.defined());
    EXPECT_TRUE(tokens.is_same(x) || tokens.size(1) == 5);
    return tokens + 1;
  };
  EXPECT_TRUE(at::equal(drop(0, x, whole), x + 1)) << "a layer that is not in the list";
  state.training = false;
  EXPECT_TRUE(at::equal(drop(1, x, whole), x + 1)) << "evaluation";
  state.training = true;
  const at::Tensor shorter = x.slice(1, 0, 5);
  EXPECT_TRUE(at::equal(drop(1, shorter, whole), shorter + 1)) << "no more tokens than are kept";
}

TEST(RandomLtd, EveryTokenIsDrawnAlikeOften) {
  TrainingState state;
  RandomLtd drop(options_of(4), 9, 0, [&] { return state; });
  const at::Tensor x = at::zeros({2, 8, 1});
  at::Tensor seen = at::zeros({2, 8});
  constexpr int kSteps = 4000;
  for (state.optimizer_steps = 0; state.optimizer_steps < kSteps; ++state.optimizer_steps) {
    drop(1, x, [&](const at::Tensor& tokens, const at::Tensor& positions) {
      seen.scatter_add_(1, positions, at::ones({2, 4}));
      return tokens;
    });
  }
  // A token is drawn with probability 1/2; five standard deviations.
  EXPECT_LT((seen / kSteps - 0.5).abs().max().item<double>(), 5 * 0.5 / std::sqrt(kSteps));
}

TEST(RandomLtd, DrawsAreThoseOfStepLayerMicroBatchAndRank) {
  TrainingState state{.optimizer_steps = 3};
  const at::Tensor x = at::zeros({2, 32, 1});
  const auto draw = [&](RandomLtd& drop, int64_t layer) {
    at::Tensor result;
    drop(layer, x, [&](const at::Tensor& tokens, const at::Tensor& positions) {
      result = positions;
      return tokens;
    });
    return result;
  };
  RandomLtd one(options_of(8), 9, 0, [&] { return state; });
  RandomLtd same(options_of(8), 9, 0, [&] { return state; });
  RandomLtd other(options_of(8), 9, 1, [&] { return state; });
  const at::Tensor first = draw(one, 1);
  EXPECT_TRUE(at::equal(first, draw(same, 1)));
  EXPECT_FALSE(at::equal(first, draw(other, 1))) << "a rank with other samples";
  EXPECT_FALSE(at::equal(first, draw(one, 1))) << "the next micro-batch";
  EXPECT_FALSE(at::equal(first, draw(one, 2))) << "another layer";
  EXPECT_FALSE(at::equal(first[0], first[1])) << "another sample";
  state.optimizer_steps = 4;
  EXPECT_FALSE(at::equal(first, draw(one, 1))) << "another step";
}

TEST(RandomLtd, ARecomputationSeesTheSameTokens) {
  RandomLtd drop(options_of(3), 9, 0, step_three);
  const at::Tensor weight = at::rand({4}, at::kDouble).requires_grad_();
  std::vector<at::Tensor> seen;
  const at::Tensor x = at::rand({2, 12, 4}, at::kDouble).requires_grad_();
  const at::Tensor out = recompute::checkpoint(
      [&](const at::Tensor& input) {
        return drop(1, input, [&](const at::Tensor& tokens, const at::Tensor& positions) {
          seen.push_back(positions);
          return tokens * weight;
        });
      },
      x);
  drop(1, x.detach(), [](const at::Tensor& tokens, const at::Tensor&) { return tokens; });
  out.sum().backward();
  ASSERT_EQ(seen.size(), 2U);
  EXPECT_TRUE(at::equal(seen[0], seen[1]));
}

// A causal mask is the same for any tokens in order; one with padding follows them.
TEST(RandomLtd, Masks) {
  const at::Tensor causal = at::ones({1, 1, 6, 6}, at::kBool).tril();
  const at::Tensor positions = at::tensor({0, 2, 5, 1, 3, 4}, at::kLong).view({2, 3});
  EXPECT_TRUE(at::equal(causal_mask_of(causal, positions), at::ones({1, 1, 3, 3}, at::kBool).tril()));
  EXPECT_TRUE(causal_mask_of(causal, {}).is_same(causal));
  const at::Tensor mask = at::rand({2, 2, 6, 6});
  const at::Tensor found = padding_mask_of(mask, positions);
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t h = 0; h < 2; ++h) {
      EXPECT_TRUE(at::equal(found[b][h], mask[b][h].index_select(0, positions[b]).index_select(1, positions[b])));
    }
  }
  EXPECT_EQ(padding_mask_of(at::rand({1, 1, 6, 6}), positions).sizes(), at::IntArrayRef({2, 1, 3, 3}));
  EXPECT_THROW(padding_mask_of(at::rand({6, 6}), positions), UsageError);
}

TEST(RandomLtd, WhatCannotBeIsNamed) {
  RandomLtd drop(options_of(3), 9, 0, step_three);
  const auto same = [](const at::Tensor& tokens, const at::Tensor&) { return tokens; };
  EXPECT_THROW(drop(1, at::rand({3, 4}), same), UsageError);
  EXPECT_EQ(drop(0, at::rand({3, 4}), same).dim(), 2) << "a layer that drops nothing takes what there is";
  EXPECT_THROW(drop(1, at::rand({2, 12, 4}), [](const at::Tensor& tokens, const at::Tensor&) { return tokens.sum(); }),
               UsageError);
  EXPECT_THROW(RandomLtd(options_of(3, 2), 9, 0, step_three), UsageError);
}

}  // namespace
}  // namespace ds::efficiency
