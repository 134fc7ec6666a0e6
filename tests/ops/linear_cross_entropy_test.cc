// The chunked loss and its gradients beside at::linear and at::cross_entropy_loss of the whole.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "core/text.h"
#include "dsengine/errors.h"
#include "dsengine/ops.h"
#include "tests/ops/numerical_gradient.h"
#include "tests/support/autocast_scope.h"

namespace ds::ops {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr int64_t kRows = 37;
constexpr int64_t kHidden = 19;
constexpr int64_t kClasses = 53;

struct Problem {
  at::Tensor hidden, weight, bias, targets;
};

at::Tensor values(at::IntArrayRef sizes, double phase, at::ScalarType type) {
  const int64_t count = c10::multiply_integers(sizes);
  return at::sin(at::arange(count, at::kDouble) * 1.7 + phase).view(sizes).to(type);
}

Problem problem(at::ScalarType type, int64_t rows = kRows) {
  Problem made;
  made.hidden = values({rows, kHidden}, 0.3, type).requires_grad_(true);
  made.weight = (values({kClasses, kHidden}, 1.1, type) * 0.5).requires_grad_(true);
  made.bias = values({kClasses}, 2.9, type).requires_grad_(true);
  made.targets = at::arange(rows, at::kLong).mul(29).remainder(kClasses);
  return made;
}

// What the operator replaces.
at::Tensor whole_loss(const Problem& made, const LinearCrossEntropyOptions& options) {
  at::Tensor logits = at::linear(made.hidden, made.weight, made.bias) * options.logit_scale;
  if (logits.scalar_type() != at::kDouble) logits = logits.to(at::kFloat);
  if (options.logit_softcap) logits = (logits / *options.logit_softcap).tanh() * *options.logit_softcap;
  const auto reduction = options.reduction == LossReduction::kMean ? at::Reduction::Mean : at::Reduction::Sum;
  return at::cross_entropy_loss(logits.view({-1, logits.size(-1)}), made.targets.reshape({-1}), {}, reduction,
                                options.ignore_index, options.label_smoothing);
}

at::Tensor chunked(const Problem& made, const LinearCrossEntropyOptions& options) {
  return linear_cross_entropy(made.hidden, made.weight, made.bias, made.targets, options);
}

// Loss and gradients of both, after a factor as a loss scale is one.
void expect_the_same(const Problem& made, const LinearCrossEntropyOptions& options, double tolerance,
                     const std::string& what = "") {
  std::vector<at::Tensor> inputs = {made.hidden, made.weight};
  if (made.bias.defined()) inputs.push_back(made.bias);
  const at::Tensor expected = whole_loss(made, options);
  const at::Tensor found = chunked(made, options);
  EXPECT_EQ(found.scalar_type(), expected.scalar_type()) << what;
  EXPECT_LE(relative_difference(found, expected), tolerance) << what;
  const auto expected_gradients = torch::autograd::grad({expected * 3.0}, inputs);
  const auto gradients = torch::autograd::grad({found * 3.0}, inputs);
  for (size_t i = 0; i < inputs.size(); ++i) {
    EXPECT_EQ(gradients[i].scalar_type(), inputs[i].scalar_type()) << what;
    EXPECT_LE(relative_difference(gradients[i], expected_gradients[i]), tolerance) << what << ", gradient " << i;
  }
}

TEST(LinearCrossEntropy, IsTheLossOfTheWholeForAnyChunk) {
  for (const int64_t rows : {int64_t{0}, int64_t{1}, int64_t{5}, int64_t{36}, kRows, int64_t{1000}}) {
    for (const LossReduction reduction : {LossReduction::kMean, LossReduction::kSum}) {
      const LinearCrossEntropyOptions options{.reduction = reduction, .chunk_rows = rows};
      expect_the_same(problem(at::kFloat), options, 1e-6, cat("float32, chunks of ", rows));
      expect_the_same(problem(at::kDouble), options, 1e-14, cat("float64, chunks of ", rows));
    }
  }
}

TEST(LinearCrossEntropy, EveryOptionIsThatOfTheWhole) {
  for (const double smoothing : {0.0, 0.1, 1.0}) {
    for (const double scale : {1.0, 0.37}) {
      for (const std::optional<double> cap : {std::optional<double>(), std::optional<double>(1.5)}) {
        for (const int64_t ignored : {-100, 7}) {
          Problem made = problem(at::kFloat);
          made.targets[3] = ignored;
          made.targets[kRows - 1] = ignored;
          LinearCrossEntropyOptions options{.label_smoothing = smoothing, .logit_scale = scale, .chunk_rows = 8};
          options.ignore_index = ignored;
          options.logit_softcap = cap;
          expect_the_same(made, options, 2e-6,
                          cat("smoothing ", smoothing, ", scale ", scale, ", cap ", cap.value_or(0)));
        }
      }
    }
  }
}

TEST(LinearCrossEntropy, WithoutBiasAndWithManyDimensions) {
  Problem made = problem(at::kFloat, 24);
  made.bias.reset();
  made.hidden = made.hidden.detach().view({2, 3, 4, kHidden}).requires_grad_(true);
  made.targets = made.targets.view({2, 3, 4});
  expect_the_same(made, {.chunk_rows = 5}, 1e-6);
}

TEST(LinearCrossEntropy, TensorsThatAreNotContiguous) {
  Problem made = problem(at::kFloat, 24);
  made.hidden = values({kHidden, 6, 4}, 0.3, at::kFloat).permute({2, 1, 0}).requires_grad_(true);
  made.weight = values({kHidden, 2 * kClasses}, 1.1, at::kFloat).t().slice(0, 0, 2 * kClasses, 2).requires_grad_(true);
  made.bias = values({2 * kClasses}, 2.0, at::kFloat).slice(0, 0, 2 * kClasses, 2).requires_grad_(true);
  made.targets = made.targets.view({6, 4}).t();
  expect_the_same(made, {.chunk_rows = 7}, 1e-6);
}

// The whole in float64 on the same rounded numbers is the truth; LibTorch's own loss in 16 bits is as far from it.
TEST(LinearCrossEntropy, SixteenBitsAreAsExactAsTheWhole) {
  for (const at::ScalarType type : {at::kBFloat16, at::kHalf}) {
    for (const int64_t rows : {0, 10}) {
      const Problem made = problem(type);
      const auto gradients_of = [&](const at::Tensor& loss) {
        return torch::autograd::grad({loss}, {made.hidden, made.weight, made.bias});
      };
      Problem exact;
      exact.hidden = made.hidden.detach().to(at::kDouble).requires_grad_(true);
      exact.weight = made.weight.detach().to(at::kDouble).requires_grad_(true);
      exact.bias = made.bias.detach().to(at::kDouble).requires_grad_(true);
      exact.targets = made.targets;
      const at::Tensor truth = whole_loss(exact, {});
      const auto true_gradients = torch::autograd::grad({truth}, {exact.hidden, exact.weight, exact.bias});
      const at::Tensor found = chunked(made, {.chunk_rows = rows});
      EXPECT_EQ(found.scalar_type(), at::kFloat);
      const at::Tensor plain = whole_loss(made, {});
      const double step = type == at::kHalf ? 0x1p-11 : 0x1p-8;
      EXPECT_LE(relative_difference(found, truth), step);
      const auto gradients = gradients_of(found);
      const auto plain_gradients = gradients_of(plain);
      for (size_t i = 0; i < gradients.size(); ++i) {
        EXPECT_EQ(gradients[i].scalar_type(), type);
        EXPECT_LE(relative_difference(gradients[i], true_gradients[i]),
                  2 * relative_difference(plain_gradients[i], true_gradients[i]) + step)
            << type << ", gradient " << i;
      }
    }
  }
}

TEST(LinearCrossEntropy, Float16TakesALossScaleThatItCannotHold) {
  const Problem made = problem(at::kHalf);
  const auto gradients = torch::autograd::grad({chunked(made, {}) * 65536.0}, {made.hidden, made.weight, made.bias});
  const auto unscaled = torch::autograd::grad({chunked(made, {})}, {made.hidden, made.weight, made.bias});
  for (size_t i = 0; i < gradients.size(); ++i) {
    EXPECT_TRUE(gradients[i].isfinite().all().item<bool>());
    EXPECT_LE(relative_difference(unscaled[i], gradients[i].to(at::kDouble) / 65536.0), 2e-3) << i;
  }
}

TEST(LinearCrossEntropy, GradientsAreThoseOfDifferences) {
  Problem made = problem(at::kDouble, 5);
  made.targets[2] = -100;
  LinearCrossEntropyOptions options{.label_smoothing = 0.2, .logit_scale = 0.7, .chunk_rows = 2};
  options.logit_softcap = 2.0;
  for (const LossReduction reduction : {LossReduction::kMean, LossReduction::kSum}) {
    options.reduction = reduction;
    const auto loss = [&](const std::vector<at::Tensor>& x) {
      return linear_cross_entropy(x[0], x[1], x[2], made.targets, options);
    };
    expect_numerical_gradients(loss, {made.hidden, made.weight, made.bias});
  }
}

TEST(LinearCrossEntropy, NothingThatCounts) {
  Problem ignored = problem(at::kFloat);
  ignored.targets.fill_(-100);
  for (const Problem& made : {ignored, problem(at::kFloat, 0)}) {
    const at::Tensor mean = chunked(made, {.chunk_rows = 9});
    EXPECT_TRUE(std::isnan(whole_loss(made, {}).item<float>()));
    EXPECT_TRUE(std::isnan(mean.item<float>()));
    const at::Tensor sum = chunked(made, {.reduction = LossReduction::kSum, .chunk_rows = 9});
    EXPECT_EQ(sum.item<float>(), 0.0F);
    for (const at::Tensor& loss : {mean, sum}) {
      for (const at::Tensor& gradient : torch::autograd::grad({loss}, {made.hidden, made.weight, made.bias})) {
        EXPECT_TRUE(gradient.eq(0).all().item<bool>()) << "as LibTorch's are";
      }
    }
  }
}

TEST(LinearCrossEntropy, OnlyWhatIsWantedIsMade) {
  const Problem made = problem(at::kFloat);
  const at::Tensor expected = whole_loss(made, {});
  {
    const at::NoGradGuard no_grad;
    const at::Tensor loss = chunked(made, {});
    EXPECT_FALSE(loss.requires_grad());
    EXPECT_LE(relative_difference(loss, expected), 1e-6);
  }
  for (size_t wanted = 0; wanted < 3; ++wanted) {
    std::vector<at::Tensor> inputs = {made.hidden.detach(), made.weight.detach(), made.bias.detach()};
    inputs[wanted].requires_grad_(true);
    const at::Tensor loss = linear_cross_entropy(inputs[0], inputs[1], inputs[2], made.targets);
    const auto gradients = torch::autograd::grad({loss}, {inputs[wanted]});
    const auto all = torch::autograd::grad({whole_loss(made, {})}, {made.hidden, made.weight, made.bias});
    EXPECT_LE(relative_difference(gradients[0], all[wanted]), 1e-6) << wanted;
  }
}

TEST(LinearCrossEntropy, BackwardTwiceOverAKeptGraphAndTwoUsesOfAWeight) {
  const Problem made = problem(at::kFloat);
  const std::vector<at::Tensor> inputs = {made.hidden, made.weight, made.bias};
  const at::Tensor loss = chunked(made, {.chunk_rows = 6});
  const auto once = torch::autograd::grad({loss * 2.0}, inputs, {}, /*retain_graph=*/true);
  const auto again = torch::autograd::grad({loss * 2.0}, inputs);
  for (size_t i = 0; i < inputs.size(); ++i) EXPECT_TRUE(once[i].equal(again[i])) << i;
  EXPECT_ANY_THROW(torch::autograd::grad({loss}, inputs)) << "its graph is gone";

  const auto twice = torch::autograd::grad({chunked(made, {}) + chunked(made, {}) * 0.5}, inputs);
  const auto expected = torch::autograd::grad({whole_loss(made, {}) * 1.5}, inputs);
  for (size_t i = 0; i < inputs.size(); ++i) EXPECT_LE(relative_difference(twice[i], expected[i]), 1e-6) << i;
}

TEST(LinearCrossEntropy, GradientsGoOnThroughWhatIsBefore) {
  Problem made = problem(at::kFloat);
  const at::Tensor x = made.hidden;
  const auto gradient_of = [&](auto loss) {
    made.hidden = x.tanh() * 2.0;
    return torch::autograd::grad({loss(made, LinearCrossEntropyOptions{.chunk_rows = 4})}, {x})[0];
  };
  EXPECT_LE(relative_difference(gradient_of(chunked), gradient_of(whole_loss)), 1e-6);
}

TEST(LinearCrossEntropy, AutocastCastsAsLinearDoes) {
  const Problem made = problem(at::kFloat);
  at::Tensor found;
  at::Tensor expected;
  {
    const test::AutocastScope autocast;
    found = chunked(made, {});
    expected = whole_loss(made, {});
  }
  EXPECT_LE(relative_difference(found, expected), 1e-6) << "the same products in bfloat16";
  EXPECT_GT(relative_difference(found, whole_loss(made, {})), 1e-6) << "autocast was on";
  const std::vector<at::Tensor> inputs = {made.hidden, made.weight, made.bias};
  const auto gradients = torch::autograd::grad({found}, inputs);
  const auto expected_gradients = torch::autograd::grad({expected}, inputs);
  for (size_t i = 0; i < inputs.size(); ++i) {
    EXPECT_EQ(gradients[i].scalar_type(), at::kFloat);
    EXPECT_LE(relative_difference(gradients[i], expected_gradients[i]), 0x1p-7) << i;
  }
}

TEST(LinearCrossEntropy, DoubleBackwardIsRefused) {
  const Problem made = problem(at::kFloat);
  EXPECT_THAT(
      [&] {
        torch::autograd::grad({chunked(made, {})}, {made.hidden}, {}, /*retain_graph=*/true, /*create_graph=*/true);
      },
      ThrowsMessage<UsageError>(AllOf(HasSubstr("without create_graph"), HasSubstr("at::cross_entropy_loss"))));
}

TEST(LinearCrossEntropy, WhatDoesNotFitIsRefused) {
  const auto expect_refused = [](const auto& change, const std::string& text) {
    Problem made = problem(at::kFloat);
    LinearCrossEntropyOptions options;
    change(made, options);
    EXPECT_THAT([&] { chunked(made, options); }, ThrowsMessage<UsageError>(HasSubstr(text)));
  };
  using Options = LinearCrossEntropyOptions;
  expect_refused([](Problem& p, Options&) { p.weight = p.weight.t(); }, "found [37, 19] and [19, 53]");
  expect_refused([](Problem& p, Options&) { p.bias = p.bias.slice(0, 1); }, "expected a bias of [53]");
  expect_refused([](Problem& p, Options&) { p.targets = p.targets.slice(0, 1); }, "found [36] beside [37, 19]");
  expect_refused([](Problem& p, Options&) { p.targets = p.targets.to(at::kInt); }, "targets of int64, found Int");
  expect_refused([](Problem& p, Options&) { p.weight = p.weight.to(at::kDouble); }, "found Double");
  expect_refused([](Problem& p, Options&) { p.hidden = p.targets.view({-1, 1}).expand({-1, kHidden}); }, "found Long");
  expect_refused([](Problem& p, Options&) { p.weight = at::Tensor(); }, "found an undefined tensor");
  expect_refused([](Problem& p, Options&) { p.targets[9] = kClasses; },
                 "[0, 53) or ignore_index -100, found 53 at "
                 "position 9 of 37");
  expect_refused([](Problem& p, Options&) { p.targets[2] = -1; }, "found -1 at position 2");
  expect_refused([](Problem&, Options& o) { o.label_smoothing = 1.5; }, "label_smoothing in [0, 1], found 1.5");
  expect_refused([](Problem&, Options& o) { o.logit_softcap = 0.0; }, "logit_softcap > 0, found 0");
  expect_refused([](Problem&, Options& o) { o.chunk_rows = -1; }, "chunk_rows >= 0, found -1");
  for (const double number : {std::numeric_limits<double>::infinity(), std::nan("")}) {
    expect_refused([&](Problem&, Options& o) { o.logit_softcap = number; }, "a finite logit_softcap > 0, found ");
    expect_refused([&](Problem&, Options& o) { o.logit_scale = number; }, "a finite logit_scale, found ");
  }
  expect_refused(
      [](Problem& p, Options&) {
        p.hidden = p.hidden.slice(1, 0, 0);
        p.weight = p.weight.slice(1, 0, 0);
      },
      "H > 0");
}

// Shapes alone, as a program finds out what it would make: this device knows no autocast.
TEST(LinearCrossEntropy, OnTheMetaDevice) {
  const Problem made = problem(at::kFloat);
  const at::Tensor loss = linear_cross_entropy(made.hidden.detach().to(at::kMeta), made.weight.detach().to(at::kMeta),
                                               made.bias.detach().to(at::kMeta), made.targets.to(at::kMeta));
  EXPECT_TRUE(loss.is_meta());
  EXPECT_EQ(loss.dim(), 0);
}

}  // namespace
}  // namespace ds::ops
