// Names against patterns in each dialect, and each part of a name.
#include "core/name_pattern.h"

#include <gtest/gtest.h>

namespace ds {
namespace {

bool stars(const std::string& pattern, const std::string& name, NamePart part = NamePart::kWhole) {
  return NamePattern::stars(pattern).matches(name, part);
}

bool regex(const std::string& pattern, const std::string& name, NamePart part = NamePart::kWhole) {
  return NamePattern::regex(pattern).matches(name, part);
}

TEST(NamePattern, AStarStandsForAnyTextAtAnyPlace) {
  EXPECT_TRUE(stars("h.0.bias", "h.0.bias"));
  EXPECT_FALSE(stars("h.0.bias", "h.0.bias2"));
  EXPECT_FALSE(stars("h.0.bias", "h.0.bia"));
  EXPECT_TRUE(stars("*", ""));
  EXPECT_TRUE(stars("*", "h.0"));
  EXPECT_TRUE(stars("*bias", "h.0.bias"));
  EXPECT_TRUE(stars("h.*", "h.0.bias"));
  EXPECT_FALSE(stars("h.*", "encoder.h.0"));
  EXPECT_TRUE(stars("*bias*", "h.0.bias_of_experts"));
  EXPECT_TRUE(stars("*bias*", "bias"));
  EXPECT_FALSE(stars("*bias*", "h.0.weight"));
  EXPECT_TRUE(stars("h.*.mlp.*.weight", "h.0.mlp.fc.weight"));
  EXPECT_FALSE(stars("h.*.mlp.*.weight", "h.0.mlp.weight"));
  EXPECT_TRUE(stars("*ab", "aab"));
  EXPECT_TRUE(stars("a**b", "a.b"));
  EXPECT_FALSE(stars("", "a"));
  EXPECT_TRUE(stars("", ""));
}

TEST(NamePattern, BesideTheStarEveryLetterIsItself) {
  EXPECT_FALSE(stars("b?as", "bias"));
  EXPECT_FALSE(stars("h[01]", "h0"));
  EXPECT_TRUE(stars("h[01]", "h[01]"));
  EXPECT_FALSE(stars("h.0", "h_0"));
  EXPECT_TRUE(stars("a\\b", "a\\b"));
}

TEST(NamePattern, StarsMatchTheAskedPartOfAName) {
  EXPECT_TRUE(stars("0.mlp", "h.0.mlp.fc", NamePart::kAnywhere));
  EXPECT_FALSE(stars("0.mlp", "h.0.mlp.fc", NamePart::kStart));
  EXPECT_TRUE(stars("h.*.mlp", "h.0.mlp.fc", NamePart::kStart));
  EXPECT_TRUE(stars("mlp.fc", "h.0.mlp.fc", NamePart::kEnd));
  EXPECT_FALSE(stars("lp.fc", "h.0.mlp.fc", NamePart::kEnd));
  EXPECT_TRUE(stars("h.0.mlp.fc", "h.0.mlp.fc", NamePart::kEnd));
}

TEST(NamePattern, AStarCanStandForANumber) {
  const NamePattern pattern = NamePattern::numbers("layers.*.q_proj");
  EXPECT_TRUE(pattern.matches("layers.12.q_proj"));
  EXPECT_FALSE(pattern.matches("layers.x.q_proj"));
  EXPECT_FALSE(pattern.matches("layers..q_proj"));
  EXPECT_FALSE(pattern.matches("layers_12.q_proj"));
  EXPECT_FALSE(pattern.matches("model.layers.12.q_proj"));
  EXPECT_TRUE(pattern.matches("model.layers.12.q_proj", NamePart::kEnd));
}

TEST(NamePattern, RegularExpressionsMatchTheAskedPartOfAName) {
  EXPECT_TRUE(regex("h\\.\\d+", "h.12"));
  EXPECT_FALSE(regex("h\\.\\d+", "h.12.mlp"));
  EXPECT_TRUE(regex("h\\.\\d+", "h.12.mlp", NamePart::kStart));
  EXPECT_FALSE(regex("mlp", "h.12.mlp", NamePart::kStart));
  EXPECT_TRUE(regex("l", "h.12.mlp.fc", NamePart::kAnywhere));
  EXPECT_TRUE(regex("(up|gate)_proj", "h.12.gate_proj", NamePart::kEnd));
  EXPECT_TRUE(regex("up_proj|gate_proj", "h.12.up_proj", NamePart::kEnd));
  EXPECT_FALSE(regex("gate_proj", "h.12.my_gate_proj", NamePart::kEnd));
  EXPECT_FALSE(regex("gate_proj", "h.12.gate_proj.bias", NamePart::kEnd));
}

TEST(NamePattern, RegularExpressionsCanTakeLettersOfAnyCase) {
  EXPECT_FALSE(regex("block", "GptBlock", NamePart::kAnywhere));
  EXPECT_TRUE(NamePattern::regex("block", Letters::kAnyCase).matches("GptBlock", NamePart::kAnywhere));
}

TEST(NamePattern, SaysWhyATextIsNoRegularExpression) {
  EXPECT_EQ(regex_problem("h\\.\\d+"), "");
  EXPECT_NE(regex_problem("("), "");
  EXPECT_NE(regex_problem("a{"), "");
  EXPECT_THROW(NamePattern::regex("("), std::regex_error);
}

TEST(NamePattern, ATextIsMatchedByItsRegularExpressionAlone) {
  const std::string name = "h.0.w[1]*(a)?";
  const std::string expression = regex_of_text(name);
  EXPECT_TRUE(regex(expression, name));
  EXPECT_FALSE(regex(expression, "hx0.w[1]*(a)?"));
}

}  // namespace
}  // namespace ds
