// The dialect of the Python package hjson.
#include "core/json/hjson.h"

#include <gmock/gmock.h>

#include "core/check.h"

namespace ds {
namespace {

using nlohmann::ordered_json;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

ordered_json read(const std::string& text) { return parse_hjson(text, "test.json").root; }

std::string refusal(const std::string& text) {
  try {
    parse_hjson(text, "test.json");
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

TEST(Hjson, ReadsPlainJson) {
  const ordered_json expected = {{"a", 1}, {"b", {1, 2.5, "x", nullptr, true}}, {"c", {{"d", false}}}};
  EXPECT_EQ(read(R"({"a": 1, "b": [1, 2.5, "x", null, true], "c": {"d": false}})"), expected);
}

TEST(Hjson, SkipsAllThreeKindsOfComment) {
  EXPECT_EQ(read("{ # one\n \"a\": 1, // two\n /* three\n lines */ \"b\": 2 }"), (ordered_json{{"a", 1}, {"b", 2}}));
}

TEST(Hjson, CommasMayTrailOrBeLeftToTheLineEnd) {
  EXPECT_EQ(read("{\"a\": [1, 2,], \"b\": 3,}"), (ordered_json{{"a", {1, 2}}, {"b", 3}}));
  EXPECT_EQ(read("{\n\"a\": 1\n\"b\": 2\n}"), (ordered_json{{"a", 1}, {"b", 2}}));
}

TEST(Hjson, StringsMayBeSingleQuotedOrBare) {
  EXPECT_EQ(read("{'a': 'say \"hi\"', b: bare text here\n}"),
            (ordered_json{{"a", "say \"hi\""}, {"b", "bare text here"}}));
}

TEST(Hjson, BareTextTakesTheCommaWithIt) {
  // As the Python package does: an unquoted string ends with its line.
  EXPECT_EQ(read("{\n  a: CONFIG_NAME,\n  b: 1\n}"), (ordered_json{{"a", "CONFIG_NAME,"}, {"b", 1}}));
}

TEST(Hjson, NumbersInScientificNotation) {
  const ordered_json root = read(R"({"a": 5e8, "b": 1e-5, "c": 9007199254740993, "d": -0.5})");
  EXPECT_TRUE(root["a"].is_number_integer());
  EXPECT_EQ(root["a"], 500000000);
  EXPECT_DOUBLE_EQ(root["b"], 1e-5);
  EXPECT_EQ(root["c"].get<int64_t>(), 9007199254740993);
  EXPECT_DOUBLE_EQ(root["d"], -0.5);
}

TEST(Hjson, EscapesAndMultiLineStrings) {
  EXPECT_EQ(read(R"({"a": "x\n\u00e9\ud83d\ude00"})")["a"], "x\n\u00e9\U0001F600");
  EXPECT_EQ(read("{a: '''\n    one\n    two\n    '''}")["a"], "one\ntwo");
}

TEST(Hjson, TheRootMayLackItsBraces) { EXPECT_EQ(read("a: 1\nb: 2\n"), (ordered_json{{"a", 1}, {"b", 2}})); }

TEST(Hjson, RemembersLinesAndDuplicates) {
  const HjsonDocument document = parse_hjson("{\n \"a\": {\n  \"b\": 1\n },\n \"a\": {\"b\": 2}\n}", "test.json");
  EXPECT_EQ(document.root["a"]["b"], 2);
  EXPECT_EQ(document.line_of("/nothing"), 0);
  ASSERT_EQ(document.duplicates.size(), 1U);
  EXPECT_EQ(document.duplicates[0].pointer, "/a");
  EXPECT_THAT(document.duplicates[0].lines, ElementsAre(2, 5));
}

TEST(Hjson, SyntaxErrorsNameLineAndColumn) {
  EXPECT_THAT(refusal("{\n  \"a\": 1\n"), AllOf(HasSubstr("test.json:"), HasSubstr("not closed by '}'")));
  EXPECT_THAT(refusal("{\"a\": \"open\n}"), AllOf(HasSubstr("test.json:1:7"), HasSubstr("not closed")));
  EXPECT_THAT(refusal("{\"a\" 1}"), HasSubstr("expected ':'"));
  EXPECT_THAT(refusal("{\"a\": 1} x"), HasSubstr("test.json:1:10"));
  EXPECT_THAT(refusal("{\"a\": \"\\x\"}"), HasSubstr("escape"));
  EXPECT_THAT(refusal("{\"a\": 1e999}"), HasSubstr("out of range"));
  EXPECT_THAT(refusal("{\"a\": \"\xff\"}"), HasSubstr("UTF-8"));
}

}  // namespace
}  // namespace ds
