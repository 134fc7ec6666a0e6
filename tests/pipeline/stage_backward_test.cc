// Gradients of inputs and of weights, made in one pass or in two, are the same bits.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <vector>

#include "dsengine/activation_checkpoint.h"
#include "dsengine/layer_spec.h"
#include "pipeline/stage_backward.h"

namespace ds::pipeline {
namespace {

struct Case {
  std::string name;
  std::vector<at::Tensor> weights;
  std::function<Tensors(const Tensors&)> forward;
  Tensors inputs;
  bool splits = true;
};

struct Gradients {
  Tensors inputs;
  Tensors weights;
};

Gradients run(const Case& test, bool split) {
  Tensors leaves;
  for (const at::Tensor& input : test.inputs) {
    leaves.push_back(input.detach().clone());
    if (input.is_floating_point()) leaves.back().set_requires_grad(true);
  }
  for (const at::Tensor& weight : test.weights) weight.mutable_grad().reset();
  Tensors outputs;
  Tensors gradients;
  for (const at::Tensor& output : test.forward(leaves)) {
    if (!output.requires_grad()) continue;
    outputs.push_back(output);
    gradients.push_back(torch::cos(torch::arange(output.numel(), torch::kFloat)).view(output.sizes()));
  }
  StageBackward backward(outputs, leaves);
  outputs.clear();
  Gradients result;
  if (!split) {
    result.inputs = backward.whole(gradients);
  } else {
    EXPECT_EQ(backward.can_split(), test.splits);
    if (!backward.can_split()) return run(test, false);
    result.inputs = backward.inputs_only(gradients);
    for (const at::Tensor& weight : test.weights)
      EXPECT_FALSE(weight.grad().defined()) << "the first pass is of inputs";
    backward.weights();
  }
  for (const at::Tensor& weight : test.weights) {
    result.weights.push_back(weight.grad().defined() ? weight.grad().clone() : at::Tensor());
  }
  return result;
}

void expect_same(const Tensors& found, const Tensors& wanted, const char* what) {
  ASSERT_EQ(found.size(), wanted.size());
  for (size_t i = 0; i < wanted.size(); ++i) {
    ASSERT_EQ(found[i].defined(), wanted[i].defined()) << what << ' ' << i;
    if (wanted[i].defined()) {
      EXPECT_TRUE(torch::equal(found[i], wanted[i])) << what << ' ' << i;
    }
  }
}

at::Tensor weight_of(std::vector<int64_t> sizes, double phase) {
  int64_t numel = 1;
  for (const int64_t size : sizes) numel *= size;
  return (torch::sin(torch::arange(numel, torch::kFloat) * 0.7 + phase) * 0.5).view(sizes).requires_grad_(true);
}

std::vector<Case> cases() {
  std::vector<Case> all;
  const at::Tensor x = weight_of({2, 3, 4}, 0.3).detach();
  const at::Tensor w = weight_of({4, 4}, 1);
  const at::Tensor v = weight_of({4, 4}, 2);
  const at::Tensor b = weight_of({4}, 3);
  const at::Tensor g = weight_of({4}, 4);
  const auto chain = [=](const Tensors& in) -> Tensors {
    const at::Tensor h = torch::gelu(torch::nn::functional::linear(in[0], w, b));
    const at::Tensor n = torch::layer_norm(h, {4}, g, b);
    return {in[0] + torch::nn::functional::linear(n, v)};
  };
  all.push_back({"AChain", {w, v, b, g}, chain, {x}});
  all.push_back({"OneWeightInManyLayers",
                 {w},
                 [=](const Tensors& in) -> Tensors { return {torch::matmul(torch::tanh(torch::matmul(in[0], w)), w)}; },
                 {x}});
  // One transposed view of it, so that both products lead into one node.
  all.push_back({"OneViewInTwoLayers",
                 {w, v},
                 [=](const Tensors& in) -> Tensors {
                   const at::Tensor t = w.t();
                   return {torch::matmul(torch::matmul(torch::tanh(torch::matmul(in[0], t)), v), t)};
                 },
                 {x}});
  all.push_back({"AWeightComputedFromAWeight",
                 {w, v},
                 [=](const Tensors& in) -> Tensors {
                   const at::Tensor normed = w / w.norm();
                   return {torch::matmul(torch::matmul(in[0], normed) * 2.0, v)};
                 },
                 {x}});
  // `s` reaches the output both through a product with the input and through another weight.
  all.push_back({"AWeightThatIsUsedInTwoWays",
                 {w, v},
                 [=](const Tensors& in) -> Tensors {
                   const at::Tensor s = torch::tanh(w);
                   return {torch::matmul(torch::matmul(in[0], s), torch::matmul(s, v))};
                 },
                 {x}});
  // Likewise, with an activation checkpoint, which gives gradients of what it uses in the first pass only.
  all.push_back({"AWeightThatACheckpointAndAWeightUse",
                 {w, v},
                 [=](const Tensors& in) -> Tensors {
                   const at::Tensor s = torch::tanh(w);
                   const auto region = [s](const Tensors& given) -> Tensors { return {torch::matmul(given[0], s)}; };
                   return {torch::matmul(recompute::checkpoint_tensors({}, region, in)[0], torch::matmul(s, v))};
                 },
                 {x},
                 false});
  all.push_back({"TwoInputsAndOneThatIsNotUsed",
                 {w, b},
                 [=](const Tensors& in) -> Tensors {
                   return {torch::nn::functional::linear(in[0], w, b) * in[1], in[1] * 2.0, in[2]};
                 },
                 {x, x * 0.5, torch::arange(3), x * 2.0}});
  all.push_back({"AnInputThatIsAnOutput",
                 {w},
                 [=](const Tensors& in) -> Tensors {
                   return {torch::matmul(in[0], w), in[0]};
                 },
                 {x}});
  all.push_back({"Convolution",
                 {b},
                 [=, kernel = weight_of({4, 3, 3}, 5)](const Tensors& in) -> Tensors {
                   return {torch::conv1d(in[0], kernel, b, 1, 1)};
                 },
                 {x}});
  all.push_back({"WithoutWeights", {}, [](const Tensors& in) -> Tensors { return {torch::tanh(in[0])}; }, {x}, false});
  all.push_back({"AnActivationCheckpoint",
                 {w, v, b, g},
                 [=](const Tensors& in) -> Tensors { return recompute::checkpoint_tensors({}, chain, in); },
                 {x},
                 false});
  all.push_back({"AnActivationCheckpointBesideALayer",
                 {w, v, b, g},
                 [=, last = weight_of({4, 4}, 6)](const Tensors& in) -> Tensors {
                   return {torch::matmul(recompute::checkpoint_tensors({}, chain, in)[0], last)};
                 },
                 {x}});
  return all;
}

class StageBackwardTest : public testing::TestWithParam<size_t> {};

TEST_P(StageBackwardTest, TwoPassesGiveTheSameBits) {
  const Case test = cases()[GetParam()];
  const Gradients wanted = run(test, false);
  const Gradients found = run(test, true);
  expect_same(found.inputs, wanted.inputs, "input");
  expect_same(found.weights, wanted.weights, "weight");
}

std::string name_of_case(const testing::TestParamInfo<size_t>& index) { return cases()[index.param].name; }

INSTANTIATE_TEST_SUITE_P(Graphs, StageBackwardTest, testing::Range(size_t{0}, cases().size()), name_of_case);

TEST(StageBackward, GradientsAddUpOverMicroBatches) {
  const Case test = cases()[0];
  const Gradients once = run(test, true);
  Tensors sums;
  for (const at::Tensor& gradient : once.weights) sums.push_back(gradient + gradient);
  at::Tensor leaf = test.inputs[0].detach().requires_grad_(true);
  for (const at::Tensor& weight : test.weights) weight.mutable_grad().reset();
  for (int i = 0; i < 2; ++i) {
    const Tensors outputs = test.forward({leaf});
    StageBackward backward(outputs, {leaf});
    backward.inputs_only({torch::cos(torch::arange(outputs[0].numel(), torch::kFloat)).view(outputs[0].sizes())});
    backward.weights();
  }
  for (size_t i = 0; i < sums.size(); ++i) EXPECT_TRUE(torch::allclose(test.weights[i].grad(), sums[i]));
  EXPECT_FALSE(leaf.grad().defined()) << "what goes back to the stage before is no gradient of a weight";
}

TEST(StageBackward, AStageWithoutGradientsHasNothingToDo) {
  StageBackward backward({}, {torch::ones({2})});
  EXPECT_FALSE(backward.can_split());
  const Tensors inputs = backward.whole({});
  ASSERT_EQ(inputs.size(), 1U);
  EXPECT_FALSE(inputs[0].defined());
}

TEST(StageBackward, TheFirstPassGivesBackWhatTheSecondDoesNotNeed) {
  const at::Tensor w = weight_of({4, 4}, 1);
  at::Tensor leaf = weight_of({2, 4}, 2);
  at::Tensor product = torch::matmul(leaf, w);
  at::Tensor activated = torch::tanh(product);  // whose backward keeps `activated`
  const auto memory = activated.storage().getWeakStorageImpl();
  at::Tensor out = activated * 2.0;
  StageBackward backward({out}, {leaf});
  out.reset();
  activated.reset();
  product.reset();
  ASSERT_TRUE(backward.can_split());
  EXPECT_FALSE(memory.expired()) << "tanh needs its result";
  backward.inputs_only({torch::ones({2, 4})});
  EXPECT_TRUE(memory.expired()) << "weights do not";
  backward.weights();
  EXPECT_TRUE(w.grad().defined());
}

}  // namespace
}  // namespace ds::pipeline
