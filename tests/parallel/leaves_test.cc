// What optimizers see of a split module: gradients, their norm, and leaves that are frozen.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "dsengine/errors.h"
#include "tests/parallel/split_ranks.h"
#include "tests/support/thrown.h"

namespace ds::parallel {
namespace {

using enum Style;
using testing::AllOf;
using testing::HasSubstr;

struct Perceptron : torch::nn::Module {
  Perceptron() {
    first = register_module("first", torch::nn::Linear(6, 10));
    second = register_module("second", torch::nn::Linear(10, 6));
    tied = register_parameter("tied", at::ones({6}));
    register_parameter("tied_again", tied);
  }
  at::Tensor forward(const at::Tensor& x) { return second(first(x).tanh()) * tied; }
  torch::nn::Linear first{nullptr}, second{nullptr};
  at::Tensor tied;
};

std::vector<SplitRule> perceptron_rules() {
  return {{.pattern = "first", .style = kColumn}, {.pattern = "second", .style = kRow}};
}

at::Tensor batch() { return at::arange(24, at::kFloat).view({4, 6}).sin(); }

std::shared_ptr<Perceptron> perceptron() {
  return made_alike<Perceptron>([] { return std::make_shared<Perceptron>(); });
}

void expect_gradients_of(const Perceptron& reference, const Perceptron& module) {
  for (const auto& entry : module.named_parameters()) {
    at::Tensor truth = reference.named_parameters()[entry.key()].grad();
    const bool split = is_split(entry.value());
    if (split) truth = slice_of(truth, placement_of(entry.value()));
    EXPECT_LE(relative_error((split ? leaf_of(entry.value()) : entry.value()).grad(), truth), 1e-5) << entry.key();
  }
}

TEST(Leaves, AreClippedByTheNormOfTheWholeModel) {
  for (const double factor : {0.3, 2.0}) {
    const auto reference = perceptron();
    (reference->forward(batch()).pow(2).sum() * 10).backward();
    double norm = 0;
    std::vector<at::Tensor> parameters = reference->parameters();
    std::erase_if(parameters, [&](const at::Tensor& parameter) { return parameter.is_same(reference->tied); });
    parameters.push_back(reference->tied);  // once
    for (const at::Tensor& parameter : parameters) norm += parameter.grad().norm().pow(2).item<double>();
    norm = std::sqrt(norm);
    torch::nn::utils::clip_grad_norm_(parameters, factor * norm);
    test::run_ranks(3, [&](comm::Communicator& communicator) {
      const auto module = perceptron();
      const SplitModule split = parallelize_module(*module, shared(communicator), perceptron_rules());
      (module->forward(batch()).pow(2).sum() * 10).backward();
      EXPECT_NEAR(split.clip_grad_norm_(factor * norm), norm, 1e-4 * norm);
      expect_gradients_of(*reference, *module);
      EXPECT_THROW(split.clip_grad_norm_(0), UsageError);
      split.zero_grad();
      for (const at::Tensor& leaf : split.leaves()) EXPECT_FALSE(leaf.grad().defined());
      EXPECT_EQ(split.clip_grad_norm_(1), 0) << "without gradients";
    });
  }
}

TEST(Leaves, OfAnotherRankThatHasNoGradientsCount) {
  test::run_ranks(2, [](comm::Communicator& communicator) {
    const auto module = perceptron();
    const SplitModule split = parallelize_module(*module, shared(communicator), perceptron_rules());
    const at::Tensor leaf = split.leaves()[1];
    ASSERT_EQ(split.named_leaves[1].first, "first.weight");
    if (communicator.rank() == 1) leaf.mutable_grad() = at::ones_like(leaf);
    const double norm = std::sqrt(5.0 * 6.0);
    EXPECT_NEAR(split.clip_grad_norm_(1), norm, 1e-6);
    if (communicator.rank() == 1) EXPECT_NEAR(leaf.grad().max().item<double>(), 1 / norm, 1e-4);
  });
}

TEST(Leaves, OfATiedParameterAreCutByTheRuleOfAnyOfItsNames) {
  test::run_ranks(2, [](comm::Communicator& communicator) {
    const auto module = perceptron();
    const std::vector<SplitRule> rules = {{.pattern = "tied_again", .style = kColumn}};
    const SplitModule split = parallelize_module(*module, shared(communicator), rules);
    const auto parameters = module->named_parameters();
    EXPECT_TRUE(is_split(parameters["tied"]) && parameters["tied"].is_same(parameters["tied_again"]));
    ASSERT_EQ(split.leaves().size(), 5U);  // the tied one once
    EXPECT_LE(relative_error(whole(module->forward(batch())), perceptron()->forward(batch())), 1e-5);
    const auto other = perceptron();
    EXPECT_THAT(
        test::thrown_by<UsageError>(
            [&] {
              parallelize_module(*other, shared(communicator), {{.pattern = "tied", .style = kWhole}, rules.front()});
            },
            "none"),
        AllOf(HasSubstr("tied and tied_again are one tensor"), HasSubstr("Give both one rule")));
  });
}

TEST(Leaves, AreClippedOnOneRankToo) {
  const auto module = perceptron();
  test::run_ranks(1, [&](comm::Communicator& communicator) {
    const SplitModule split = parallelize_module(*module, shared(communicator), perceptron_rules());
    module->forward(batch()).pow(2).sum().backward();
    EXPECT_GT(split.clip_grad_norm_(0.01), 0.01);
    EXPECT_NEAR(split.clip_grad_norm_(0.01), 0.01, 1e-5);
  });
}

// torch's habits, which would train whole parameters alone, or add gradients up, without a word.
TEST(Leaves, HabitsOverTheModulesParametersAreErrorsThatNameOne) {
  test::run_ranks(2, [](comm::Communicator& communicator) {
    const auto module = perceptron();
    torch::optim::SGD before(module->parameters(), 0.3);
    const SplitModule split = parallelize_module(*module, shared(communicator), perceptron_rules());
    const auto error_of = [](const auto& body) { return test::thrown_by(body, "none"); };
    const auto backward = [&] { module->forward(batch()).pow(2).sum().backward(); };
    before.zero_grad();
    module->zero_grad();
    backward();
    EXPECT_THAT(error_of([&] { before.step(); }),
                AllOf(HasSubstr("parameter first.weight"), HasSubstr("split.leaves()")));
    EXPECT_THAT(error_of([&] { torch::nn::utils::clip_grad_norm_(module->parameters(), 1.0); }),
                AllOf(HasSubstr("first.weight"), HasSubstr("split.clip_grad_norm_(max_norm)")));
    EXPECT_THAT(error_of([&] { module->zero_grad(/*set_to_none=*/false); }), HasSubstr("split.zero_grad()"));
    backward();  // adds up
    module->zero_grad();
    EXPECT_THAT(error_of(backward), AllOf(HasSubstr("parameter "), HasSubstr("split.zero_grad()")));
    split.zero_grad();
    backward();
    // LibTorch's sentence, which the page of a tensor axis explains.
    EXPECT_THAT(error_of([&] { torch::optim::SGD late(module->parameters(), 0.3); }),
                HasSubstr("can't optimize a non-leaf Tensor"));
    // An optimizer over the leaves does what it should, with zero_grad() of either kind, and beside the module's.
    torch::optim::SGD right(split.leaves(), 0.3);
    for (const bool to_none : {true, false}) {
      right.step();
      right.zero_grad(to_none);
      module->zero_grad();
      EXPECT_EQ(error_of(backward), "none") << to_none;
    }
  });
}

// A program's own function, which gets the split parameter itself.
struct Product : torch::autograd::Function<Product> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& w) {
    context->save_for_backward({x, w});
    return x * w;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto saved = context->get_saved_variables();
    return {gradients[0] * saved[1], gradients[0] * saved[0]};
  }
};

TEST(Leaves, MayBeFrozenAfterTheSplitAndThawedAgain) {
  const auto reference = perceptron();
  const at::Tensor input = batch().requires_grad_();
  const auto loss_of = [](Perceptron& module, const at::Tensor& x) {
    const at::Tensor weight = module.first->weight;
    return module.forward(x).pow(2).sum() + Product::apply(x.narrow(0, 0, 1), weight).sum();
  };
  loss_of(*reference, input).backward();
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    const auto module = perceptron();
    const SplitModule split = parallelize_module(*module, shared(communicator), perceptron_rules());
    for (const at::Tensor& leaf : split.leaves()) leaf.set_requires_grad(false);
    const at::Tensor own = batch().requires_grad_();
    at::Tensor loss = loss_of(*module, own);
    loss.backward();
    EXPECT_LE(relative_error(own.grad(), input.grad()), 1e-5);
    for (const at::Tensor& leaf : split.leaves()) EXPECT_FALSE(leaf.grad().defined());
    for (const at::Tensor& leaf : split.leaves()) leaf.set_requires_grad(true);
    loss = loss_of(*module, batch());
    loss.backward();
    expect_gradients_of(*reference, *module);
  });
}

TEST(Leaves, OfAFunctionWithAGradientThatIsWholeWhereItsInputIsAViewOfAJoinedTensor) {
  test::run_ranks(2, [](comm::Communicator& communicator) {
    const std::shared_ptr<Axis> axis = make_axis(shared(communicator));
    const at::Tensor own = at::ones({4, 6}).requires_grad_();
    const at::Tensor view = distribute(own, axis, 1).select(1, 2);  // joined: no cut
    ASSERT_TRUE(is_split(view));
    Product::apply(at::full({4}, 3.0), view).sum().backward();
    at::Tensor expected = at::zeros({4, 6});
    expected.select(1, 2).fill_(3);
    EXPECT_EQ(relative_error(own.grad(), expected), 0);
    EXPECT_EQ(relative_error(slice_of(at::ones({4}), placement_of(view)), at::ones({4})), 0);
  });
}

}  // namespace
}  // namespace ds::parallel
