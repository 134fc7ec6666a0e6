// Which parameters are cut, and why.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "dsengine/errors.h"
#include "dsengine/parallel.h"
#include "tests/support/thrown.h"

namespace ds::parallel {
namespace {

using enum Style;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

const std::vector<NamedShape> kModel = {
    {.name = "wte.weight", .sizes = {50257, 8}}, {.name = "h.0.qkv.weight", .sizes = {24, 8}},
    {.name = "h.0.qkv.bias", .sizes = {24}},     {.name = "h.0.proj.weight", .sizes = {8, 8}},
    {.name = "h.0.proj.bias", .sizes = {8}},     {.name = "scale", .sizes = {}}};

TEST(SplitPlan, StylesCutWeightsAndBiases) {
  const SplitPlan plan = plan_splits(kModel,
                                     {{.pattern = "wte", .style = kVocabulary},
                                      {.pattern = "h\\.\\d+\\.qkv", .style = kColumn, .blocks = {8, 8, 8}},
                                      {.pattern = ".*proj", .style = kRow}},
                                     2);
  ASSERT_EQ(plan.size(), kModel.size());
  EXPECT_EQ(plan[0].dim, 0);
  EXPECT_THAT(plan[0].reason, HasSubstr("uneven"));
  EXPECT_EQ(plan[1].dim, 0);
  EXPECT_THAT(plan[1].blocks, ElementsAre(8, 8, 8));
  EXPECT_EQ(plan[2].dim, 0);
  EXPECT_THAT(plan[2].blocks, ElementsAre(8, 8, 8));
  EXPECT_EQ(plan[3].dim, 1);
  EXPECT_FALSE(plan[4].is_split());
  EXPECT_THAT(plan[4].reason, HasSubstr("a bias is added once"));
  EXPECT_FALSE(plan[5].is_split());
  EXPECT_THAT(describe(plan), HasSubstr("h.0.qkv.weight [24, 8]: dimension 0 over 2 ranks: column, by 'h"));
}

TEST(SplitPlan, TheFirstRuleDecides) {
  const SplitPlan plan =
      plan_splits(kModel, {{.pattern = "h.0.qkv.bias", .style = kWhole}, {.pattern = ".*qkv", .style = kColumn}}, 2);
  EXPECT_TRUE(plan[1].is_split());
  EXPECT_FALSE(plan[2].is_split());
  EXPECT_THAT(plan[0].reason, HasSubstr("no rule matches"));
}

TEST(SplitPlan, WeightsStoredTransposed) {
  const SplitPlan plan = plan_splits(kModel, {{.pattern = ".*qkv", .style = kColumn, .dim = 1}}, 2);
  EXPECT_EQ(plan[1].dim, 1);
  EXPECT_EQ(plan[2].dim, 0);
}

TEST(SplitPlan, WhatIsTooSmallStaysWhole) {
  const SplitPlan plan = plan_splits(kModel, {{.pattern = ".*qkv", .style = kColumn, .blocks = {20, 2, 2}}}, 4);
  EXPECT_FALSE(plan[1].is_split());
  EXPECT_THAT(plan[1].reason, HasSubstr("leave nothing for some of 4 ranks"));
  EXPECT_FALSE(plan_splits(kModel, {{.pattern = ".*qkv", .style = kColumn, .grain = 12}}, 3)[1].is_split());
}

TEST(SplitPlan, OneRankSplitsNothing) {
  for (const ParameterSplit& split : plan_splits(kModel, {{.pattern = ".*qkv", .style = kColumn}}, 1)) {
    EXPECT_FALSE(split.is_split());
  }
}

std::string error_of(const std::vector<SplitRule>& rules) {
  return test::thrown_by<UsageError>([&] { plan_splits(kModel, rules, 2); }, "");
}

TEST(SplitPlan, RulesThatCannotBeMeantAreErrors) {
  EXPECT_THAT(error_of({{.pattern = "h.0.qkw"}}), HasSubstr("matches no parameter"));
  EXPECT_THAT(error_of({{.pattern = "qkv"}}), HasSubstr("for the whole name"));
  EXPECT_THAT(error_of({{.pattern = "(", .style = kRow}}), HasSubstr("no regular expression"));
  EXPECT_THAT(error_of({{.pattern = ".*qkv", .blocks = {8, 8}}}), HasSubstr("blocks have 16"));
  EXPECT_THAT(error_of({{.pattern = ".*qkv", .grain = 5}}), HasSubstr("no multiple of the grain"));
  EXPECT_THAT(error_of({{.pattern = ".*qkv", .dim = 2}}), HasSubstr("cuts dimension 2"));
  EXPECT_THAT(error_of({{.pattern = ".*qkv"}}), IsEmpty());
}

}  // namespace
}  // namespace ds::parallel
