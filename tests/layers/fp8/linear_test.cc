// Unmodified Linear layers on FP8 against the formula in float64.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "dsengine/activation_checkpoint.h"
#include "dsengine/errors.h"
#include "layers/fp8/linear.h"
#include "tests/layers/fp8/fp8_numbers.h"
#include "tests/recompute/chosen_modules.h"
#include "tests/support/autocast_scope.h"
#include "tests/support/thread_ranks.h"

namespace ds::fp8 {
namespace {

using testing::HasSubstr;

constexpr int64_t kIn = 32;
constexpr int64_t kOut = 48;

at::Tensor waves(at::IntArrayRef sizes, double step) {
  int64_t numel = 1;
  for (const int64_t size : sizes) numel *= size;
  return torch::sin(torch::arange(numel, torch::kDouble) * step).view(sizes);
}

torch::nn::Linear layer_of(at::ScalarType type, int64_t in = kIn, int64_t out = kOut, bool bias = true) {
  torch::nn::Linear layer(torch::nn::LinearOptions(in, out).bias(bias));
  const torch::NoGradGuard no_grad;
  layer->weight.copy_(waves({out, in}, 0.9));
  if (bias) layer->bias.copy_(waves({out}, 0.4));
  layer->to(type);
  return layer;
}

std::shared_ptr<Scaling> on_fp8(torch::nn::Linear& layer, ScalingOptions options) {
  options.arithmetic = Arithmetic::kEmulated;
  auto scaling = std::make_shared<Scaling>(options, std::vector<std::string>{"itself"}, c10::kCPU);
  set_layers(linears_of(*layer), scaling);
  return scaling;
}

at::Tensor stated_alone(const at::Tensor& values, at::ScalarType format) {
  return stated(values, format, stated_scale(values, format, 0));
}

struct Gradients {
  at::Tensor output, input, weight, bias;
};

Gradients run(torch::nn::Linear& layer, const at::Tensor& values, const at::Tensor& gradient) {
  const at::Tensor input = values.clone().requires_grad_(true);
  layer->zero_grad();
  const at::Tensor output = layer->forward(input);
  output.backward(gradient);
  return {output.detach(), input.grad(), layer->weight.grad().clone(),
          layer->bias.defined() ? layer->bias.grad().clone() : at::Tensor()};
}

void expect_near(const at::Tensor& found, const at::Tensor& expected, at::ScalarType type) {
  EXPECT_EQ(found.scalar_type(), type);
  const double tolerance = type == at::kFloat ? 1e-5 : 8e-3;
  EXPECT_EQ(found.sizes(), expected.sizes());
  const double largest = expected.abs().max().item<double>();
  EXPECT_LT((found.to(at::kDouble) - expected).abs().max().item<double>(), tolerance * largest);
}

// What each tensor is on FP8, multiplied in float64.
Gradients stated_run(const torch::nn::Linear& layer, const at::Tensor& values, const at::Tensor& gradient,
                     const ScalingOptions& options) {
  const at::Tensor x = stated_alone(values, kE4M3).view({-1, kIn});
  const at::Tensor w = stated_alone(layer->weight.detach(), kE4M3);
  const at::Tensor g = stated_alone(gradient, options.gradients).view({-1, kOut});
  const at::Tensor bias = layer->bias.defined() ? layer->bias.detach().to(at::kDouble) : torch::zeros({1}, at::kDouble);
  const at::Tensor plain = gradient.to(at::kDouble).reshape({-1, kOut});
  Gradients result;
  result.output = (torch::mm(x, w.t()) + bias).view(gradient.sizes());
  result.input = torch::mm(g, w).view(values.sizes());
  result.weight =
      options.weight_gradients ? torch::mm(g.t(), x) : torch::mm(plain.t(), values.to(at::kDouble).reshape({-1, kIn}));
  result.bias = plain.sum(0);
  return result;
}

TEST(Fp8Linear, IsTheFormula) {
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const at::ScalarType gradients : {kE5M2, kE4M3}) {
      for (const bool weight_gradients : {false, true}) {
        for (const Recipe recipe : {Recipe::kCurrent, Recipe::kDelayed}) {
          torch::nn::Linear layer = layer_of(type);
          const ScalingOptions options = {
              .recipe = recipe, .gradients = gradients, .weight_gradients = weight_gradients};
          const auto scaling = on_fp8(layer, options);
          const at::Tensor values = (waves({3, 5, kIn}, 1.3) * 3).to(type);
          const at::Tensor gradient = (waves({3, 5, kOut}, 0.7) * 0.01).to(type);
          const Gradients found = run(layer, values, gradient);
          const Gradients expected = stated_run(layer, values, gradient, options);
          expect_near(found.output, expected.output, type);
          expect_near(found.input, expected.input, type);
          expect_near(found.weight, expected.weight, type);
          expect_near(found.bias, expected.bias, type);
          // It is not what the layer computes without.
          const at::Tensor plain =
              torch::mm(values.to(at::kDouble).view({-1, kIn}), layer->weight.detach().to(at::kDouble).t()) +
              layer->bias.detach().to(at::kDouble);
          EXPECT_GT((found.output.to(at::kDouble).view({-1, kOut}) - plain).abs().max().item<double>(), 0.01);
        }
      }
    }
  }
}

TEST(Fp8Linear, OfBlocksIsTheFormula) {
  torch::nn::Linear layer = layer_of(at::kFloat, 256, 384, /*bias=*/false);
  // Rows of other magnitudes, of which the small ones would be lost with one scale for all.
  const at::Tensor values = (waves({7, 256}, 1.3) * torch::exp(waves({7, 1}, 2.0) * 8)).to(at::kFloat);
  const at::Tensor gradient = waves({7, 384}, 0.7).to(at::kFloat);
  const Gradients plain = run(layer, values, gradient);
  const auto scaling = on_fp8(layer, {.recipe = Recipe::kCurrent, .blocks = true});
  const Gradients found = run(layer, values, gradient);
  const at::Tensor weight = dequantized(quantize_blocks(layer->weight.detach(), kE4M3, 0)).to(at::kDouble);
  const at::Tensor rows = dequantized(quantize_rows(values, kE4M3, 0)).to(at::kDouble);
  const at::Tensor gradients = dequantized(quantize_rows(gradient, kE5M2, 0)).to(at::kDouble);
  const auto expect_rows = [](const at::Tensor& result, const at::Tensor& expected, const at::Tensor& factor) {
    const at::Tensor distance = (result.to(at::kDouble) - expected).abs().amax({1}) / factor.norm(2, 1);
    EXPECT_LT(distance.max().item<double>(), 1e-4);
  };
  expect_rows(found.output, torch::mm(rows, weight.t()), rows);
  expect_rows(found.input, torch::mm(gradients, weight), gradients);
  EXPECT_TRUE(torch::equal(found.weight, plain.weight));
  EXPECT_FALSE(torch::equal(found.output, plain.output));
}

TEST(Fp8Linear, TakesNoRowsOneDimensionAndFrozenParts) {
  torch::nn::Linear layer = layer_of(at::kFloat);
  const auto scaling = on_fp8(layer, {});
  EXPECT_EQ(layer->forward(torch::zeros({0, kIn})).sizes(), (std::vector<int64_t>{0, kOut}));
  const at::Tensor one = waves({kIn}, 0.3).to(at::kFloat);
  const at::Tensor of_one = layer->forward(one);
  EXPECT_TRUE(torch::equal(of_one, layer->forward(one.view({1, kIn}))[0]));
  layer->weight.set_requires_grad(false);
  const at::Tensor input = waves({4, kIn}, 0.3).to(at::kFloat).requires_grad_(true);
  layer->forward(input).sum().backward();
  EXPECT_FALSE(layer->weight.grad().defined());
  EXPECT_TRUE(layer->bias.grad().defined());
  EXPECT_TRUE(input.grad().defined());
}

// Recorded operators run again on tensors by which no layer is known: products on FP8 are kept, what follows them is
// dropped.
TEST(Fp8Linear, InChosenModulesGradientsAreThoseWithout) {
  for (const Recipe recipe : {Recipe::kDelayed, Recipe::kCurrent}) {
    torch::nn::Sequential model(layer_of(at::kFloat), torch::nn::GELU(), layer_of(at::kFloat, kOut, kIn));
    const auto scaling =
        std::make_shared<Scaling>(ScalingOptions{.recipe = recipe, .arithmetic = Arithmetic::kEmulated},
                                  std::vector<std::string>{"0", "2"}, c10::kCPU);
    set_layers(linears_of(*model), scaling);
    const at::Tensor rows = waves({6, kIn}, 1.3).to(at::kFloat);
    for (const at::Tensor& input : {rows, rows.view({2, 3, kIn})}) {
      for (const ds::Recompute way : recompute::kBothWays) {
        const auto statistics = recompute::expect_same_step(
            *model, [](const std::string& name, const torch::nn::Module&) { return name.empty(); }, {.recompute = way},
            [&] { return torch::gelu(model->forward(input)).pow(2).sum(); });
        EXPECT_GE(statistics.dropped_tensors, 2) << "the inputs of the second layer and of pow";
      }
    }
  }
}

// What autocast casts to bfloat16 is on FP8 as a layer of bfloat16; gradients come back in the weights' dtype.
TEST(Fp8Linear, UnderAutocastIsTheLayerInItsPrecision) {
  torch::nn::Linear wide = layer_of(at::kFloat);
  torch::nn::Linear narrow = layer_of(at::kBFloat16);
  {
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < 2; ++i) wide->parameters()[i].copy_(narrow->parameters()[i]);
  }
  for (const Recipe recipe : {Recipe::kDelayed, Recipe::kCurrent}) {
    const auto of_wide = on_fp8(wide, {.recipe = recipe});
    const auto of_narrow = on_fp8(narrow, {.recipe = recipe});
    const at::Tensor rows = waves({6, kIn}, 1.3).to(at::kFloat);
    for (const at::Tensor& values : {rows, rows.view({2, 3, kIn})}) {
      std::vector<int64_t> sizes = values.sizes().vec();
      sizes.back() = kOut;
      const at::Tensor of_output = waves(sizes, 0.7).to(at::kBFloat16);
      const Gradients expected = run(narrow, values.to(at::kBFloat16), of_output);
      const at::Tensor input = values.clone().requires_grad_(true);
      wide->zero_grad();
      const at::Tensor output = [&] {
        const test::AutocastScope autocast;
        return wide->forward(input);
      }();
      output.backward(of_output);
      EXPECT_TRUE(torch::equal(output, expected.output)) << values.sizes();
      EXPECT_TRUE(torch::equal(input.grad(), expected.input.to(at::kFloat)));
      EXPECT_TRUE(torch::equal(wide->weight.grad(), expected.weight.to(at::kFloat)));
      EXPECT_TRUE(torch::equal(wide->bias.grad(), expected.bias.to(at::kFloat)));
    }
    EXPECT_TRUE(torch::equal(of_wide->memory(0), of_narrow->memory(0)));
  }
}

TEST(Fp8Linear, TheWeightTimesItselfIsNoLayer) {
  torch::nn::Linear layer = layer_of(at::kFloat, kIn, kIn, /*bias=*/false);
  const at::Tensor plain = torch::matmul(layer->weight, layer->weight.t());
  const at::Tensor of_layer = layer->forward(waves({4, kIn}, 1.3).to(at::kFloat));
  const auto scaling = on_fp8(layer, {});
  EXPECT_TRUE(torch::equal(torch::matmul(layer->weight, layer->weight.t()), plain));
  EXPECT_TRUE(
      torch::equal(torch::matmul(layer->weight.detach().narrow(0, 4, 8), layer->weight.t()), plain.narrow(0, 4, 8)));
  EXPECT_TRUE(torch::equal(torch::addmm(torch::zeros({kIn}), layer->weight, layer->weight.t()), plain));
  EXPECT_FALSE(torch::equal(layer->forward(waves({4, kIn}, 1.3).to(at::kFloat)), of_layer));
}

struct SharedLinear : torch::nn::Module {
  explicit SharedLinear(const at::Tensor& of_another) { register_parameter("weight", of_another); }
};

TEST(Fp8Linear, ASharedWeightHasTheNamesOfAllItsLayers) {
  const auto model = std::make_shared<torch::nn::Module>();
  const auto first = model->register_module("first", torch::nn::Linear(kIn, kOut));
  model->register_module("other", torch::nn::Linear(kIn, kOut));
  model->register_module("head", std::make_shared<SharedLinear>(first->weight));
  const std::vector<NamedLinear> layers = linears_of(*model);
  ASSERT_EQ(layers.size(), 2U);
  EXPECT_THAT(layers[0].names, testing::ElementsAre("first", "head"));
  EXPECT_EQ(layers[0].name(), "first");
  EXPECT_THAT(layers[1].names, testing::ElementsAre("other"));
}

// As Hugging Face has it: a Linear layer whose weight is [in, out].
struct Conv1D : torch::nn::Module {
  explicit Conv1D(const torch::nn::Linear& linear) : torch::nn::Module("Conv1D") {
    weight = register_parameter("weight", linear->weight.detach().t().contiguous());
    bias = register_parameter("bias", linear->bias.detach().clone());
  }
  at::Tensor forward(const at::Tensor& rows) const { return torch::addmm(bias, rows, weight); }

  at::Tensor weight, bias;
};

TEST(Fp8Linear, AWeightWithInputsFirstIsTheTransposedLayer) {
  const at::Tensor rows = waves({6, kIn}, 1.3).to(at::kFloat);
  const at::Tensor gradient = (waves({6, kOut}, 0.7) * 0.01).to(at::kFloat);
  for (const bool weight_gradients : {false, true}) {
    torch::nn::Linear linear = layer_of(at::kFloat);
    const auto conv = std::make_shared<Conv1D>(linear);
    const at::Tensor plain = conv->forward(rows);
    const at::Tensor product = torch::matmul(rows, conv->weight);
    ScalingOptions options = {.weight_gradients = weight_gradients, .arithmetic = Arithmetic::kEmulated};
    const auto of_linear = on_fp8(linear, options);
    const Gradients expected = run(linear, rows, gradient);

    const std::vector<NamedLinear> layers = linears_of(*conv);
    ASSERT_EQ(layers.size(), 1U);
    EXPECT_EQ(layers[0].inputs(), kIn);
    EXPECT_EQ(layers[0].outputs(), kOut);
    const auto scaling = std::make_shared<Scaling>(options, std::vector<std::string>{"itself"}, c10::kCPU);
    set_layers(layers, scaling);
    const at::Tensor input = rows.clone().requires_grad_(true);
    const at::Tensor output = conv->forward(input);
    output.backward(gradient);
    EXPECT_TRUE(torch::equal(output, expected.output));
    EXPECT_FALSE(torch::equal(output, plain));
    EXPECT_TRUE(torch::equal(input.grad(), expected.input));
    EXPECT_TRUE(torch::equal(conv->bias.grad(), expected.bias));
    EXPECT_TRUE(conv->weight.grad().is_contiguous());
    expect_near(conv->weight.grad(), expected.weight.t().to(at::kDouble), at::kFloat);
    EXPECT_TRUE(torch::equal(torch::matmul(rows, conv->weight), product)) << "it is computed by addmm alone";
  }
}

TEST(Fp8Linear, EndsWithItsScales) {
  torch::nn::Linear layer = layer_of(at::kFloat);
  const at::Tensor values = waves({4, kIn}, 1.3).to(at::kFloat);
  const at::Tensor plain = layer->forward(values);
  auto scaling = on_fp8(layer, {});
  EXPECT_FALSE(torch::equal(layer->forward(values), plain));
  {
    const torch::NoGradGuard no_grad;
    EXPECT_FALSE(torch::equal(layer->forward(values), plain));
    EXPECT_FALSE(torch::equal(torch::linear(values, layer->weight, layer->bias), plain));
  }
  {  // which has neither graphs nor views
    const c10::InferenceMode inference;
    EXPECT_TRUE(torch::equal(layer->forward(values), plain));
  }
  scaling.reset();
  EXPECT_TRUE(torch::equal(layer->forward(values), plain));
  EXPECT_TRUE(torch::allclose(torch::addmm(layer->bias, values, layer->weight.t(), 1, 2),
                              layer->bias + 2 * torch::mm(values, layer->weight.t())));
  torch::nn::Linear other = layer_of(at::kFloat);
  EXPECT_TRUE(torch::equal(other->forward(values), plain));
}

TEST(Fp8Linear, WhatIsNotFiniteIsSeenInEveryGradient) {
  torch::nn::Linear layer = layer_of(at::kHalf);
  const auto scaling = on_fp8(layer, {.weight_gradients = true});
  at::Tensor gradient = waves({4, kOut}, 0.7).to(at::kHalf);
  gradient[2][1] = std::numeric_limits<double>::infinity();
  const Gradients found = run(layer, waves({4, kIn}, 1.3).to(at::kHalf), gradient);
  EXPECT_FALSE(found.input.isfinite().any().item<bool>());
  EXPECT_FALSE(found.weight.isfinite().any().item<bool>());
}

// Also where a step has come between: the scales of the first run are those of the second.
TEST(Fp8Linear, IsTheSameWhenItIsComputedAgain) {
  test::run_ranks(1, [](comm::Communicator& ranks) {
    Gradients found[2];
    for (const bool checkpointed : {false, true}) {
      torch::nn::Linear layer = layer_of(at::kFloat);
      const auto scaling = on_fp8(layer, {.history = 2});
      const at::Tensor gradient = waves({4, kOut}, 0.7).to(at::kFloat);
      run(layer, waves({4, kIn}, 1.3).to(at::kFloat), gradient);
      scaling->end_step(ranks);
      const at::Tensor input = (waves({4, kIn}, 0.3) * 5).to(at::kFloat).requires_grad_(true);
      layer->zero_grad();
      const auto impl = layer.ptr();
      const auto forward = [impl](const at::Tensor& x) {
        return impl->forward(torch::tanh(impl->forward(x)).narrow(1, 0, kIn));
      };
      const at::Tensor output = checkpointed ? recompute::checkpoint(forward, input) : forward(input);
      scaling->end_step(ranks);
      output.backward(gradient);
      found[checkpointed ? 1 : 0] = {output.detach(), input.grad(), layer->weight.grad(), layer->bias.grad()};
    }
    EXPECT_TRUE(torch::equal(found[0].output, found[1].output));
    EXPECT_TRUE(torch::equal(found[0].input, found[1].input));
    EXPECT_TRUE(torch::equal(found[0].weight, found[1].weight));
    EXPECT_TRUE(torch::equal(found[0].bias, found[1].bias));
  });
}

TEST(Fp8Linear, RefusesASecondDerivative) {
  torch::nn::Linear layer = layer_of(at::kFloat);
  const auto scaling = on_fp8(layer, {});
  const at::Tensor input = waves({4, kIn}, 0.3).to(at::kFloat).requires_grad_(true);
  const at::Tensor loss = layer->forward(input).sum();
  try {
    torch::autograd::grad({loss}, {input}, {}, std::nullopt, /*create_graph=*/true);
    FAIL() << "expected an error";
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), HasSubstr("fp8.exclude"));
  }
}

}  // namespace
}  // namespace ds::fp8
