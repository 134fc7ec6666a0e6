// Leniency: what pydantic's lax mode takes.
#include "core/json/json_convert.h"

#include <gtest/gtest.h>

#include "core/json/json_depth.h"

namespace ds {
namespace {

using nlohmann::ordered_json;

template <class T>
std::optional<T> converted(const char* json) {
  T value{};
  if (!convert(ordered_json::parse(json), value)) return std::nullopt;
  return value;
}

TEST(JsonConvert, Booleans) {
  for (const char* yes : {"true", "1", "1.0", "\"true\"", "\"YES\"", "\"on\"", "\"t\"", "\"y\"", "\"1\""}) {
    EXPECT_EQ(converted<bool>(yes), true) << yes;
  }
  for (const char* no : {"false", "0", "\"False\"", "\"no\"", "\"off\"", "\"f\"", "\"n\"", "\"0\""}) {
    EXPECT_EQ(converted<bool>(no), false) << no;
  }
  for (const char* wrong : {"2", "0.5", "null", "\"\"", "\"maybe\"", "[true]", "{}"}) {
    EXPECT_EQ(converted<bool>(wrong), std::nullopt) << wrong;
  }
}

TEST(JsonConvert, Integers) {
  EXPECT_EQ(converted<int64_t>("5e8"), 500'000'000);
  EXPECT_EQ(converted<int64_t>("5.0"), 5);
  EXPECT_EQ(converted<int64_t>("\"200000\""), 200'000);
  EXPECT_EQ(converted<int64_t>("\" 7 \""), 7);
  EXPECT_EQ(converted<int64_t>("true"), 1);
  EXPECT_EQ(converted<int64_t>("9223372036854775807"), INT64_MAX);
  for (const char* wrong : {"1.5", "\"5e8\"", "\"1.5\"", "null", "\"\"", "\"five\"", "[5]", "1e19"}) {
    EXPECT_EQ(converted<int64_t>(wrong), std::nullopt) << wrong;
  }
}

TEST(JsonConvert, Numbers) {
  EXPECT_EQ(converted<double>("1"), 1.0);
  EXPECT_EQ(converted<double>("\"1e-3\""), 1e-3);
  for (const char* wrong : {"null", "\"nan\"", "\"inf\"", "\"0.000 1,\"", "[1]"}) {
    EXPECT_EQ(converted<double>(wrong), std::nullopt) << wrong;
  }
}

TEST(JsonConvert, ListsAndOptionals) {
  EXPECT_EQ(converted<std::vector<int64_t>>("[1, \"2\", 3.0]"), (std::vector<int64_t>{1, 2, 3}));
  EXPECT_EQ(converted<std::vector<int64_t>>("[1, 2.5]"), std::nullopt);
  EXPECT_EQ((converted<std::array<double, 2>>("[0.9, 0.95]")), (std::array<double, 2>{0.9, 0.95}));
  EXPECT_EQ((converted<std::array<double, 2>>("[0.9]")), std::nullopt);
  std::optional<int64_t> value = 3;
  EXPECT_TRUE(convert(ordered_json(nullptr), value));
  EXPECT_FALSE(value.has_value());
}

TEST(JsonDepth, CountsBracketsOutsideOfTexts) {
  const auto nested = [](int depth, const std::string& inside) {
    return std::string(depth, '[') + inside + std::string(depth, ']');
  };
  EXPECT_FALSE(is_deep_json(nested(kDeepestJson, "1")));
  EXPECT_TRUE(is_deep_json(nested(kDeepestJson + 1, "")));
  EXPECT_TRUE(is_deep_json(std::string(1'000'000, '{')));
  EXPECT_FALSE(is_deep_json("[\"\\\"" + std::string(1000, '[') + "\"]"));
  EXPECT_TRUE(parse_shallow_json<ordered_json>(nested(kDeepestJson + 1, "")).is_discarded());
  EXPECT_TRUE(parse_shallow_json<ordered_json>("[1").is_discarded());
  EXPECT_EQ(parse_shallow_json<ordered_json>("[1, {}]").size(), 2U);
}

TEST(JsonConvert, MessagesShortenLongValues) {
  const std::string text = shown(std::string(500, 'x'));
  EXPECT_EQ(text.size(), 80U);
  EXPECT_TRUE(text.ends_with("..."));
}

}  // namespace
}  // namespace ds
