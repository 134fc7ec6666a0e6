// Losses and probabilities over a vocabulary that is cut, against LibTorch's on the whole: never joined.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "dsengine/errors.h"
#include "tests/parallel/split_ranks.h"

namespace ds::parallel {
namespace {

constexpr int64_t kClasses = 10;  // 4, 3 and 3 over three ranks

double tolerance_for(at::ScalarType dtype) { return dtype == at::kDouble ? 1e-12 : dtype == at::kFloat ? 2e-6 : 2e-2; }

using Computation = std::function<at::Tensor(const at::Tensor& scores)>;

// `run` on scores that are cut along `dim` against `expected` on whole ones: result, dtype and gradient.
void expect_alike(const at::Tensor& values, int64_t dim, const Computation& run, const Computation& expected,
                  const std::string& what) {
  const at::Tensor plain = values.clone().requires_grad_();
  const at::Tensor wanted = expected(plain);
  const at::Tensor weights = at::arange(wanted.numel(), at::kDouble).view(wanted.sizes()).cos() + 1.5;
  (wanted.to(at::kDouble) * weights).sum().backward();
  const double tolerance = tolerance_for(values.scalar_type());
  for (const int ranks : {2, 3}) {
    test::run_ranks(ranks, [&](comm::Communicator& communicator) {
      const std::shared_ptr<Axis> axis = make_axis(shared(communicator));
      const at::Tensor own = values.clone().requires_grad_();
      const at::Tensor found = whole(run(distribute(own, axis, dim)));
      EXPECT_EQ(found.scalar_type(), wanted.scalar_type()) << what;
      EXPECT_LE(relative_error(found, wanted), tolerance) << what << ", " << ranks << " ranks";
      (found.to(at::kDouble) * weights).sum().backward();
      EXPECT_LE(relative_error(own.grad(), plain.grad()), tolerance) << what << ", gradient, " << ranks << " ranks";
      EXPECT_TRUE(axis->joined_operators().empty()) << what << " joined " << axis->joined_operators()[0].name;
    });
  }
}

at::Tensor scores_of(const std::vector<int64_t>& sizes, at::ScalarType dtype) {
  return (at::arange(c10::multiply_integers(sizes), at::kDouble) * 1.7).sin().mul(3).view(sizes).to(dtype);
}

// Every reduction, with and without weights of the classes, smoothing, and targets to be ignored.
TEST(Vocabulary, CrossEntropyIsTheWholeOne) {
  const at::Tensor targets = at::arange(6) * 3 % kClasses;
  const at::Tensor some_ignored = targets.clone();
  some_ignored[1] = some_ignored[4] = -100;
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
    for (const int64_t dim : {0, 1}) {
      for (const int64_t reduction : {at::Reduction::None, at::Reduction::Mean, at::Reduction::Sum}) {
        for (const double smoothing : {0.0, 0.1}) {
          for (const bool weighted : {false, true}) {
            for (const at::Tensor& target : {targets, some_ignored}) {
              const at::Tensor class_weights = at::arange(1, kClasses + 1).to(dtype) / 4;
              const Computation run = [&](const at::Tensor& scores) {
                return at::cross_entropy_loss(scores, target, weighted ? std::optional(class_weights) : std::nullopt,
                                              reduction, -100, smoothing);
              };
              expect_alike(scores_of({6, kClasses}, dtype), dim, run, run,
                           std::string("cross entropy, ") + c10::toString(dtype) + ", reduction " +
                               std::to_string(reduction) + ", smoothing " + std::to_string(smoothing) +
                               (weighted ? ", weights" : ""));
            }
          }
        }
      }
    }
  }
}

TEST(Vocabulary, NegativeLogLikelihoodWithWeightsIsTheWholeOne) {
  const at::Tensor targets = at::arange(6) * 3 % kClasses;
  const at::Tensor class_weights = at::arange(1, kClasses + 1).to(at::kDouble) / 4;
  for (const int64_t reduction : {at::Reduction::None, at::Reduction::Mean, at::Reduction::Sum}) {
    const Computation run = [&](const at::Tensor& scores) {
      return at::nll_loss_nd(at::log_softmax(scores, 1), targets, class_weights, reduction, 3);
    };
    expect_alike(scores_of({6, kClasses}, at::kDouble), 1, run, run, "nll");
  }
}

TEST(Vocabulary, CrossEntropyOfOtherShapesAndOfProbabilities) {
  for (const int64_t reduction : {at::Reduction::None, at::Reduction::Mean}) {
    const Computation of_images = [&](const at::Tensor& scores) {
      return at::cross_entropy_loss(scores, (at::arange(6) * 3 % kClasses).view({2, 3}), {}, reduction, 3, 0.1);
    };
    expect_alike(scores_of({2, kClasses, 3}, at::kDouble), 1, of_images, of_images, "images");
    const Computation of_one = [&](const at::Tensor& scores) {
      return at::cross_entropy_loss(scores, at::scalar_tensor(7, at::kLong), {}, reduction);
    };
    expect_alike(scores_of({kClasses}, at::kDouble), 0, of_one, of_one, "one row");
    const at::Tensor probabilities = at::softmax(scores_of({6, kClasses}, at::kDouble).roll(1, 1), 1);
    const Computation soft = [&](const at::Tensor& scores) {
      return at::cross_entropy_loss(scores, probabilities, {}, reduction, -100, 0.1);
    };
    expect_alike(scores_of({6, kClasses}, at::kDouble), 1, soft, soft, "probabilities");
  }
}

TEST(Vocabulary, WithoutAnyRowTheMeanIsNoNumber) {
  const at::Tensor ignored = at::full({6}, -100, at::kLong);
  EXPECT_TRUE(std::isnan(at::cross_entropy_loss(scores_of({6, kClasses}, at::kFloat), ignored).item<double>()));
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    const std::shared_ptr<Axis> axis = make_axis(shared(communicator));
    for (const int64_t dim : {0, 1}) {
      const at::Tensor own = scores_of({6, kClasses}, at::kFloat).requires_grad_();
      const at::Tensor scores = distribute(own, axis, dim);
      EXPECT_TRUE(std::isnan(whole(at::cross_entropy_loss(scores, ignored)).item<double>()));
      const at::Tensor sum = at::cross_entropy_loss(scores, ignored, {}, at::Reduction::Sum, -100, 0.1);
      EXPECT_EQ(whole(sum).item<double>(), 0);
      whole(sum).backward();
      EXPECT_EQ(own.grad().abs().max().item<double>(), 0);
    }
  });
}

TEST(Vocabulary, LogProbabilitiesAreThoseOfTheWhole) {
  const at::Tensor targets = (at::arange(6) * 3 % kClasses).view({2, 3});
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
    const at::ScalarType wide = dtype == at::kBFloat16 ? at::kFloat : dtype;
    for (const int64_t dim : {0, 1, 2}) {
      expect_alike(
          scores_of({2, 3, kClasses}, dtype), dim,
          [&](const at::Tensor& scores) { return log_probabilities(scores, targets); },
          [&](const at::Tensor& scores) {
            return at::log_softmax(scores.to(wide), -1).gather(-1, targets.unsqueeze(-1)).squeeze(-1);
          },
          std::string("log_probabilities, ") + c10::toString(dtype));
    }
  }
  const at::Tensor scores = scores_of({2, 3, kClasses}, at::kFloat);
  const at::Tensor found = log_probabilities(scores, targets, 3);
  EXPECT_EQ(found[0][1].item<double>(), 0) << "ignored";
  EXPECT_LT(found[0][0].item<double>(), 0);
  EXPECT_THROW(log_probabilities(scores, targets.to(at::kFloat)), UsageError);
  EXPECT_THROW(log_probabilities(scores, targets.view({6})), UsageError);
}

TEST(Vocabulary, EntropyIsThatOfTheWhole) {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
    const at::ScalarType wide = dtype == at::kBFloat16 ? at::kFloat : dtype;
    for (const int64_t dim : {0, 1, 2}) {
      expect_alike(
          scores_of({2, 3, kClasses}, dtype), dim, [&](const at::Tensor& scores) { return entropy(scores); },
          [&](const at::Tensor& scores) {
            const at::Tensor p = at::softmax(scores.to(wide), -1);
            return -(p * p.log()).sum(-1);
          },
          std::string("entropy, ") + c10::toString(dtype));
    }
  }
  EXPECT_NEAR(entropy(at::zeros({kClasses})).item<double>(), std::log(kClasses), 1e-6);
  // Classes that are ruled out: no NaN, neither forward nor backward.
  test::run_ranks(2, [](comm::Communicator& communicator) {
    const std::shared_ptr<Axis> axis = make_axis(shared(communicator));
    const at::Tensor own = at::zeros({1, 8}).requires_grad_();
    const at::Tensor mask = at::arange(8).ge(2).view({1, 8});
    const at::Tensor found = entropy(distribute(own, axis, 1).masked_fill(mask, -INFINITY));
    EXPECT_NEAR(whole(found).item<double>(), std::log(2), 1e-6);
    whole(found).sum().backward();
    EXPECT_LE(own.grad().abs().max().item<double>(), 1e-6);
  });
}

}  // namespace
}  // namespace ds::parallel
