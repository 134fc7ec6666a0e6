// Layers whose outputs are joined (SplitRule::join_output).
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/parallel/split_ranks.h"

namespace ds::parallel {
namespace {

using enum Style;

struct Layers : torch::nn::Module {
  Layers() {
    embedding = register_module("embedding", torch::nn::Embedding(12, 8));
    first = register_module("first", torch::nn::Linear(8, 6));
    second = register_module("second", torch::nn::Linear(torch::nn::LinearOptions(6, 10).bias(false)));
  }
  at::Tensor forward(const at::Tensor& tokens) {
    const at::Tensor x = embedding(tokens);
    // A matrix, several of them, and the operator itself.
    const at::Tensor y = first(x.flatten(0, 1)).view({2, 4, 6}) + first(x) + at::linear(x, first->weight, first->bias);
    outputs = {x, y, second(y)};
    return outputs.back().pow(2).sum() + y.sin().sum();
  }
  torch::nn::Embedding embedding{nullptr};
  torch::nn::Linear first{nullptr}, second{nullptr};
  std::vector<at::Tensor> outputs;
};

TEST(JoinOutput, GivesPlainTensorsAndTheSameGradients) {
  const at::Tensor tokens = at::arange(8).view({2, 4});
  for (const bool cut : {false, true}) {
    for (const Style style : {kColumn, kRow}) {
      const std::vector<SplitRule> rules = {{.pattern = "embedding", .style = kRow, .join_output = true},
                                            {.pattern = "first", .style = style, .join_output = true},
                                            {.pattern = "second", .style = kColumn, .join_output = true}};
      expect_same_as_whole<Layers>([] { return std::make_shared<Layers>(); },
                                   [&](Layers& layers) {
                                     const at::Tensor loss = layers.forward(tokens);
                                     for (const at::Tensor& output : layers.outputs) EXPECT_FALSE(is_split(output));
                                     return loss;
                                   },
                                   {.ranks = 2, .rules = rules, .tolerance = 2e-6, .sequence_parallel = cut});
    }
  }
}

TEST(JoinOutput, IsInThePlanAndLeavesTheBiasWhole) {
  const SplitPlan plan = plan_splits({{.name = "head.weight", .sizes = {8, 4}}, {.name = "head.bias", .sizes = {8}}},
                                     {{.pattern = "head", .style = kColumn, .join_output = true}}, 2);
  EXPECT_TRUE(plan[0].is_split());
  EXPECT_TRUE(plan[0].join_output);
  EXPECT_EQ(plan[0].reason, "dimension 0 over 2 ranks: column, by 'head', its output is joined");
  EXPECT_FALSE(plan[1].is_split());
  EXPECT_EQ(plan[1].reason, "whole: column, by 'head'; a bias is added once, to the joined output");
}

}  // namespace
}  // namespace ds::parallel
