// Numbers and letters for machines, in a program whose locale has a decimal comma, groups of digits and other letters.
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>

#include "core/ascii.h"
#include "core/json/parse_json.h"
#include "core/name_pattern.h"
#include "core/number_text.h"
#include "core/text.h"
#include "tests/support/grouped_locale.h"

namespace ds {
namespace {

TEST(Locale, TheTestsOneChangesStreams) {
  const test::GroupedLocale locale;
  std::ostringstream out;
  out << 1032 << ' ' << 2.5;
  EXPECT_EQ(out.str(), "1.032 2,5");
}

TEST(Locale, TextsHaveAPointAndNoGroups) {
  const test::GroupedLocale locale;
  EXPECT_EQ(cat("global_step", 1001, " lr ", 0.5), "global_step1001 lr 0.5");
  EXPECT_EQ(cat(lazy([] { return 1234567; })), "1234567");
  EXPECT_EQ(fixed(1032.25, 1), "1032.2");
}

TEST(Locale, StreamsReadAndWriteAsInTheClassicOne) {
  const test::GroupedLocale locale;
  auto out = classic_stream<std::ostringstream>();
  out << 1032 << ' ' << 2.5;
  EXPECT_EQ(out.str(), "1032 2.5");
  auto in = classic_stream<std::istringstream>("5.10 12345");
  double version = 0;
  int64_t process = 0;
  in >> version >> process;
  EXPECT_TRUE(in);
  EXPECT_EQ(version, 5.1);
  EXPECT_EQ(process, 12345);
}

TEST(Locale, NumbersOfTextsAreRead) {
  const test::GroupedLocale locale;
  EXPECT_EQ(parse_finite_number("2.5"), 2.5);
  EXPECT_EQ(nearest_double("0.001"), 0.001);
  EXPECT_EQ(nearest_double("-1e400"), -std::numeric_limits<double>::infinity());
  EXPECT_EQ(nearest_double("1e-400"), 0.0);
  EXPECT_EQ(parse_json<nlohmann::json>("[0.001, 1e-5]"), nlohmann::json({0.001, 1e-5}));
}

TEST(Locale, LettersAreThoseOfAscii) {
  const test::GroupedLocale locale;
  EXPECT_EQ(ascii_lower("LION-\xC4\xB0"), "lion-\xC4\xB0");
  EXPECT_TRUE(equal_in_any_case("Lion", "LION"));
  EXPECT_FALSE(equal_in_any_case("Lion", "Lions"));
  EXPECT_TRUE(is_ascii_space('\t') && is_ascii_letter('z') && is_ascii_digit('0'));
  EXPECT_FALSE(is_ascii_space('\xA0') || is_ascii_letter('\xE4') || is_ascii_letter('@') || is_ascii_digit(':'));
  EXPECT_TRUE(NamePattern::regex("LINEAR", Letters::kAnyCase).matches("linear"));
}

}  // namespace
}  // namespace ds
