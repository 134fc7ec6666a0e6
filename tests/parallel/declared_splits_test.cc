// Modules that declare how they are split.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "dsengine/errors.h"
#include "parallel/split_module.h"
#include "tests/parallel/split_ranks.h"

namespace ds::parallel {
namespace {

using enum Style;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

struct DeclaredLinear : torch::nn::LinearImpl, HasSplits {
  DeclaredLinear(int64_t in, int64_t out, Style wanted) : torch::nn::LinearImpl(in, out), style(wanted) {}
  std::vector<SplitRule> splits() const override { return {{.pattern = "", .style = style}}; }
  Style style;
};

struct DeclaredMlp : torch::nn::Module, HasSplits {
  explicit DeclaredMlp(const std::string& first = "fc") : first_name(first) {
    fc = register_module(first, std::make_shared<DeclaredLinear>(8, 12, kColumn));
    proj = register_module("proj", std::make_shared<DeclaredLinear>(12, 8, kRow));
  }
  // The outer module knows more than the inner ones: it goes first.
  std::vector<SplitRule> splits() const override {
    return {{.pattern = "fc|f\\(c", .style = kColumn, .blocks = {6, 6}}};
  }
  at::Tensor forward(const at::Tensor& x) { return proj->forward(fc->forward(x).tanh()); }
  std::string first_name;
  std::shared_ptr<DeclaredLinear> fc, proj;
};

struct TwoOfThem : torch::nn::Module {
  TwoOfThem() {
    first = register_module("first", std::make_shared<DeclaredMlp>());
    second = register_module("se+cond", std::make_shared<DeclaredMlp>("f(c"));
  }
  at::Tensor forward(const at::Tensor& x) { return second->forward(first->forward(x)).pow(2).sum(); }
  std::shared_ptr<DeclaredMlp> first, second;
};

struct TiedLayers : torch::nn::Module {
  TiedLayers() {
    const at::Tensor weight = register_module("words", std::make_shared<torch::nn::Module>())
                                  ->register_parameter("weight", torch::ones({8, 4}));
    register_module("head", std::make_shared<torch::nn::Module>())->register_parameter("weight", weight);
  }
};

TEST(SplitRules, MeanATiedParameterByAnyOfItsNames) {
  const auto module = std::make_shared<TiedLayers>();
  for (const char* name : {"words", "head"}) {
    const SplitPlan plan = plan_module(*module, {{.pattern = name, .style = kVocabulary}}, 2);
    ASSERT_EQ(plan.size(), 2U);
    for (const ParameterSplit& split : plan) {
      EXPECT_EQ(split.dim, 0) << name;
      EXPECT_EQ(split.style, kVocabulary) << name;
    }
    EXPECT_EQ(plan[0].name, "words.weight");
    EXPECT_EQ(plan[1].name, "head.weight");
  }
  EXPECT_THAT(
      [&] {
        plan_module(*module, {{.pattern = "words", .style = kVocabulary}, {.pattern = "head", .style = kRow}}, 2);
      },
      ::testing::ThrowsMessage<UsageError>(
          AllOf(HasSubstr("words.weight"), HasSubstr("head.weight"), HasSubstr("one tensor"))));
}

TEST(DeclaredSplits, HaveWholeNamesAndTheOuterModulesFirst) {
  std::vector<std::string> patterns;
  for (const SplitRule& rule : declared_splits(*std::make_shared<TwoOfThem>())) patterns.push_back(rule.pattern);
  EXPECT_THAT(patterns, ElementsAre("first\\.(?:fc|f\\(c)", "first\\.fc", "first\\.proj", "se\\+cond\\.(?:fc|f\\(c)",
                                    "se\\+cond\\.f\\(c", "se\\+cond\\.proj"));
  EXPECT_THAT(declared_splits(DeclaredLinear(2, 3, kRow))[0].pattern, "");
}

TEST(DeclaredSplits, SplitTheModuleWithoutRulesOfTheProgram) {
  const at::Tensor x = at::arange(24, at::kFloat).view({3, 8}).sin();
  for (const int ranks : {2, 3}) {
    expect_same_as_whole<TwoOfThem>([] { return std::make_shared<TwoOfThem>(); },
                                    [&](TwoOfThem& model) { return model.forward(x); },
                                    {.ranks = ranks, .rules = {}, .tolerance = 3e-6});
  }
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    TwoOfThem model;
    const SplitModule split = parallelize_module(model, shared(communicator), {});
    EXPECT_EQ(split.plan[0].dim, 0);
    EXPECT_THAT(split.plan[0].blocks, ElementsAre(6, 6));
    EXPECT_EQ(split.plan[2].dim, 1);
    EXPECT_EQ(split.plan[4].name, "se+cond.f(c.weight");
    EXPECT_EQ(split.plan[4].dim, 0);
    EXPECT_FALSE(split.plan[3].is_split()) << "a row layer's bias";
  });
}

TEST(DeclaredSplits, GiveWayToThoseOfTheProgram) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    TwoOfThem model;
    const SplitModule split =
        parallelize_module(model, shared(communicator), {{.pattern = "first\\..*", .style = kWhole}});
    EXPECT_FALSE(split.plan[0].is_split());
    EXPECT_THAT(split.plan[0].reason, HasSubstr("first"));
    EXPECT_TRUE(split.plan[4].is_split());
  });
}

}  // namespace
}  // namespace ds::parallel
