// rms_norm, layer_norm and their forms with a residual, beside LibTorch's.
#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <optional>
#include <string>
#include <vector>

#include "core/text.h"
#include "dsengine/errors.h"
#include "dsengine/ops.h"
#include "tests/ops/same_function.h"
#include "tests/optim/vector_targets.h"

namespace ds::ops {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr double kNormEps = 1e-5;

// Which of the four operators, and whether it has a weight and a bias.
struct NormCase {
  bool centered = false;
  bool residual = false;
  bool weight = true;

  std::string name() const {
    return cat(centered ? "layer" : "rms", residual ? " + residual" : "", weight ? "" : ", bare");
  }
};

std::vector<NormCase> norm_cases() {
  std::vector<NormCase> cases;
  for (const bool centered : {false, true}) {
    for (const bool residual : {false, true}) {
      for (const bool weight : {false, true}) cases.push_back({centered, residual, weight});
    }
  }
  return cases;
}

// x, [residual], [weight, [bias]].
Tensors norm_inputs(const NormCase& of, at::IntArrayRef sizes, at::ScalarType type) {
  Tensors inputs = {wave(sizes, 0.1, type)};
  if (of.residual) inputs.push_back(wave(sizes, 1.3, type));
  if (of.weight) inputs.push_back(wave({sizes.back()}, 2.2, type));
  if (of.weight && of.centered) inputs.push_back(wave({sizes.back()}, 0.7, type));
  return inputs;
}

struct Named {
  at::Tensor x, residual, weight, bias;
};

Named named(const NormCase& of, const Tensors& inputs) {
  size_t next = 0;
  Named result{.x = inputs[next++]};
  if (of.residual) result.residual = inputs[next++];
  if (of.weight) result.weight = inputs[next++];
  if (of.weight && of.centered) result.bias = inputs[next++];
  return result;
}

TensorFunction ours(const NormCase& of) {
  return [of](const Tensors& inputs) -> Tensors {
    const Named in = named(of, inputs);
    if (!of.residual) {
      return {of.centered ? ops::layer_norm(in.x, in.weight, in.bias, kNormEps)
                          : ops::rms_norm(in.x, in.weight, kNormEps)};
    }
    const NormedSum made = of.centered ? ops::add_layer_norm(in.x, in.residual, in.weight, in.bias, kNormEps)
                                       : ops::add_rms_norm(in.x, in.residual, in.weight, kNormEps);
    return {made.normed, made.sum};
  };
}

TensorFunction chain(const NormCase& of) {
  return [of](const Tensors& inputs) -> Tensors {
    const Named in = named(of, inputs);
    const at::Tensor s = of.residual ? in.x + in.residual : in.x;
    const auto maybe = [](const at::Tensor& t) { return t.defined() ? std::optional(t) : std::nullopt; };
    const int64_t size = s.size(-1);
    const at::Tensor normed = of.centered ? at::layer_norm(s, {size}, maybe(in.weight), maybe(in.bias), kNormEps)
                                          : at::rms_norm(s, {size}, maybe(in.weight), kNormEps);
    return of.residual ? Tensors{normed, s} : Tensors{normed};
  };
}

TEST(Norms, AreLibTorchsForAnySize) {
  for (const NormCase& of : norm_cases()) {
    for (const std::vector<int64_t>& sizes :
         std::vector<std::vector<int64_t>>{{3, 3}, {3, 5}, {7, 16}, {2, 3, 33}, {2, 1000}, {64, 768}, {8}}) {
      const std::string what = cat(of.name(), " of ", at::IntArrayRef(sizes));
      expect_same_function(ours(of), chain(of), norm_inputs(of, sizes, at::kFloat), 2e-6, what + ", float32");
      expect_same_function(ours(of), chain(of), norm_inputs(of, sizes, at::kDouble), 1e-14, what + ", float64");
    }
  }
}

TEST(Norms, EveryInstructionSetGivesTheSame) {
  for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
    const optimizers::WithTarget use(target);
    for (const NormCase& of : norm_cases()) {
      const std::string what = cat(of.name(), " with ", hwy::TargetName(target));
      expect_same_function(ours(of), chain(of), norm_inputs(of, {5, 37}, at::kFloat), 2e-6, what);
      expect_same_function(ours(of), chain(of), norm_inputs(of, {5, 37}, at::kDouble), 1e-14, what);
      expect_rounded(ours(of), chain(of), norm_inputs(of, {5, 37}, at::kBFloat16), 0x1p-7, what);
    }
  }
}

TEST(Norms, SixteenBitsAreRoundedOnce) {
  for (const at::ScalarType type : {at::kBFloat16, at::kHalf}) {
    for (const NormCase& of : norm_cases()) {
      if (of.residual) continue;  // the sum is rounded before: compared below with its own
      // float16 is LibTorch's, which rounds more often.
      expect_rounded(ours(of), chain(of), norm_inputs(of, {9, 70}, type), 0x1p-8, cat(of.name(), " in ", type));
    }
  }
  const NormCase with{.centered = true, .residual = true};
  const Tensors inputs = norm_inputs(with, {9, 70}, at::kBFloat16);
  const at::Tensor sum = inputs[0] + inputs[1];
  const Tensors made = ours(with)(inputs);
  EXPECT_TRUE(made[1].equal(sum)) << "the sum is LibTorch's";
  EXPECT_TRUE(made[0].equal(ops::layer_norm(sum, inputs[2], inputs[3], kNormEps))) << "and what is normalised";
}

TEST(Norms, GradientsAreThoseOfDifferences) {
  for (const NormCase& of : norm_cases()) {
    expect_numerical_gradients(weighted(ours(of)), norm_inputs(of, {3, 7}, at::kDouble));
  }
}

TEST(Norms, TensorsThatAreNotContiguous) {
  for (const NormCase& of : norm_cases()) {
    Tensors inputs = norm_inputs(of, {6, 10}, at::kFloat);
    for (at::Tensor& input : inputs) {
      input = input.dim() == 2 ? wave({20, 6}, 0.3).t().slice(1, 0, 20, 2) : wave({30}, 0.8).slice(0, 0, 30, 3);
    }
    const TensorFunction transposed_cotangents = [&](const Tensors& in) {
      Tensors results = ours(of)(in);
      for (at::Tensor& result : results) result = result.t();
      return results;
    };
    const TensorFunction expected = [&](const Tensors& in) {
      Tensors results = chain(of)(in);
      for (at::Tensor& result : results) result = result.t();
      return results;
    };
    expect_same_function(transposed_cotangents, expected, inputs, 2e-6, of.name());
  }
}

TEST(Norms, WeightsOfAnotherDtype) {
  for (const at::ScalarType type : {at::kBFloat16, at::kHalf}) {  // a kernel, LibTorch's operators
    for (const NormCase& of : norm_cases()) {
      if (of.residual || !of.weight) continue;
      Tensors inputs = norm_inputs(of, {5, 24}, type);
      for (size_t i = 1; i < inputs.size(); ++i) inputs[i] = inputs[i].to(at::kFloat);
      expect_rounded(ours(of), chain(of), inputs, 0x1p-8, cat(of.name(), " in ", type));
      EXPECT_EQ(ours(of)(inputs)[0].scalar_type(), type);
      EXPECT_EQ(evaluate(ours(of), inputs).gradients[1].scalar_type(), at::kFloat);
    }
  }
}

TEST(Norms, AResidualOfAnotherDtypeIsPromotedAsByAnAddition) {
  const NormCase of{.residual = true};
  Tensors inputs = norm_inputs(of, {5, 24}, at::kBFloat16);
  inputs[1] = inputs[1].to(at::kFloat);  // a residual stream in float32 under autocast
  inputs[2] = inputs[2].to(at::kFloat);
  const Evaluated found = evaluate(ours(of), inputs);
  const Evaluated expected = evaluate(chain(of), inputs);
  EXPECT_EQ(found.results[0].scalar_type(), at::kFloat);
  EXPECT_EQ(found.gradients[0].scalar_type(), at::kBFloat16);
  expect_same({found.results, {}}, {expected.results, {}}, 2e-6, "results");
  expect_same(found, expected, 0x1p-8, "gradients");
}

TEST(Norms, GradientsOfOneResultAlone) {
  const NormCase of{.centered = true, .residual = true};
  const Tensors inputs = norm_inputs(of, {4, 9}, at::kFloat);
  for (const size_t result : {0, 1}) {
    const auto only = [&](const TensorFunction& all) -> TensorFunction {
      return [all, result](const Tensors& in) { return Tensors{all(in)[result]}; };
    };
    Tensors wanted = inputs;
    if (result == 1) wanted.resize(2);  // the sum does not depend on weights
    const auto given = [&](const TensorFunction& function) -> TensorFunction {
      return [&inputs, function](const Tensors& in) {
        Tensors whole = inputs;
        std::copy(in.begin(), in.end(), whole.begin());
        return function(whole);
      };
    };
    expect_same_function(given(only(ours(of))), given(only(chain(of))), wanted, 2e-6, cat("result ", result));
  }
}

TEST(Norms, NoRows) {
  for (const NormCase& of : norm_cases()) {
    const Evaluated made = evaluate(ours(of), norm_inputs(of, {0, 6}, at::kFloat));
    EXPECT_EQ(made.results[0].sizes(), at::IntArrayRef({0, 6}));
    for (size_t i = of.residual ? 2 : 1; i < made.gradients.size(); ++i) {
      EXPECT_TRUE(made.gradients[i].eq(0).all().item<bool>()) << of.name();
    }
  }
}

TEST(Norms, TheNumberOfThreadsChangesNoBit) {
  const int before = at::get_num_threads();
  for (const NormCase& of : norm_cases()) {
    const Tensors inputs = norm_inputs(of, {400, 515}, at::kFloat);
    at::set_num_threads(1);
    const Evaluated one = evaluate(ours(of), inputs);
    at::set_num_threads(4);
    const Evaluated four = evaluate(ours(of), inputs);
    at::set_num_threads(before);
    for (size_t i = 0; i < one.results.size(); ++i) EXPECT_TRUE(one.results[i].equal(four.results[i])) << of.name();
    for (size_t i = 0; i < one.gradients.size(); ++i) {
      EXPECT_TRUE(one.gradients[i].equal(four.gradients[i])) << of.name() << ", gradient " << i;
    }
    expect_same(one, evaluate(chain(of), inputs), 2e-5, of.name());  // sums over 400 rows
  }
}

TEST(Norms, NaNStaysNaN) {
  at::Tensor x = wave({3, 20}, 0.5);
  x[1][7] = std::nanf("");
  for (const at::Tensor& y : {ops::rms_norm(x, {}, kNormEps), ops::layer_norm(x, {}, {}, kNormEps)}) {
    EXPECT_TRUE(y[1].isnan().all().item<bool>());
    EXPECT_TRUE(y[0].isfinite().all().item<bool>());
    EXPECT_TRUE(y[2].isfinite().all().item<bool>());
  }
}

TEST(Norms, DoubleBackwardAndWhatDoesNotFitAreRefused) {
  const at::Tensor x = wave({3, 8}, 0.1).requires_grad_(true);
  EXPECT_THAT(
      [&] {
        torch::autograd::grad({ops::rms_norm(x, {}).sum()}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true);
      },
      ThrowsMessage<UsageError>(AllOf(HasSubstr("dsengine::rms_norm"), HasSubstr("without create_graph"))));
  const auto refused = [](const auto& call, const std::string& text) {
    EXPECT_THAT(call, ThrowsMessage<UsageError>(HasSubstr(text)));
  };
  refused([&] { ops::rms_norm(x.to(at::kInt), {}); }, "found [3, 8] of Int");
  refused([&] { ops::rms_norm(x, wave({7}, 0)); }, "expected weight and bias of [8] on x's device, found [7]");
  refused([&] { ops::layer_norm(x, wave({8}, 0), wave({1, 8}, 0)); }, "found [1, 8] of Float");
  refused(
      [&] {
        ops::add_rms_norm(x, wave({3, 9}, 0), {});
      },
      "expected a residual of x's shape [3, 8], on its device, found [3, 9]");
  refused([&] { ops::add_layer_norm(x, x.to(at::kInt), {}, {}); }, "of Int");
  refused([&] { ops::add_layer_norm(x, {}, {}, {}); }, "expected a residual, found an undefined tensor");
  refused([&] { ops::rms_norm(at::empty({3, 0}), {}); }, "size > 0");
}

}  // namespace
}  // namespace ds::ops
