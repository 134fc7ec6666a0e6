#include "core/number_text.h"

#include <gtest/gtest.h>

namespace ds {
namespace {

TEST(NumberText, ReadsWholeNumbersAsPeopleTypeThem) {
  EXPECT_EQ(parse_whole_number("4096"), 4096);
  EXPECT_EQ(parse_whole_number("+7"), 7);
  EXPECT_EQ(parse_whole_number("-3"), -3);
  EXPECT_EQ(parse_whole_number("1e9"), 1'000'000'000);
  EXPECT_EQ(parse_whole_number("2.5E3"), 2500);
  EXPECT_EQ(parse_whole_number("4.0"), 4);
  EXPECT_EQ(parse_whole_number("9223372036854775807"), INT64_MAX);
}

TEST(NumberText, RefusesTheRest) {
  for (const char* text : {"", "+", "x", "1x", " 1", "0x10", "1.5", "1e-1", "1e19", "9223372036854775808", "nan", "inf",
                           "1e400", "1,000"}) {
    EXPECT_FALSE(parse_whole_number(text)) << text;
  }
}

TEST(NumberText, ReadsFiniteNumbers) {
  EXPECT_EQ(parse_finite_number("2.5"), 2.5);
  EXPECT_EQ(parse_finite_number("-1e-3"), -1e-3);
  for (const char* text : {"", "nan", "inf", "-inf", "1e400", "1.5x"}) EXPECT_FALSE(parse_finite_number(text)) << text;
}

}  // namespace
}  // namespace ds
