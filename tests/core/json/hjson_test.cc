// The dialect of the Python package hjson.
#include "core/json/hjson.h"

#include <gmock/gmock.h>

#include "core/check.h"
#include "tests/support/thrown.h"

namespace ds {
namespace {

using nlohmann::ordered_json;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

ordered_json read(const std::string& text) { return parse_hjson(text, "test.json").root; }

std::string refusal(const std::string& text) {
  return test::thrown_by<ConfigError>([&] { parse_hjson(text, "test.json"); }, "");
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

TEST(Hjson, NamesAMissingComma) {
  EXPECT_THAT(refusal("{\n\"a\": 4 \"b\": {}}"),
              AllOf(HasSubstr("test.json:2:7: expected a comma after 4, found the key \"b\"")));
  EXPECT_THAT(refusal("{\"a\": true 'b' : 1\n}"), HasSubstr("expected a comma after true"));
  EXPECT_THAT(refusal("{a: 4 b: 1}"),
              AllOf(HasSubstr("not closed"), HasSubstr("in line 1, 4 b: 1}, reaches to the end of its line")));
  EXPECT_EQ(read("{a: 4 \"quoted\" words\n}")["a"], "4 \"quoted\" words");
}

TEST(Hjson, NamesWhatJsonHasNot) {
  EXPECT_THAT(refusal("{\n\"lr\": NaN,\n\"b\": 1}"), HasSubstr("test.json:2:7: expected a value of JSON, found NaN"));
  EXPECT_THAT(refusal("{\"lr\": -Infinity}"), HasSubstr("found -Infinity; write a finite number"));
  EXPECT_THAT(refusal("{\"a\": True, \"b\": 1}"), HasSubstr("found True; write true"));
  EXPECT_THAT(refusal("{\"a\": None}"), HasSubstr("write null"));
  EXPECT_EQ(read("{\"a\": \"NaN\"}")["a"], "NaN");
  EXPECT_EQ(read("a: Nano\n")["a"], "Nano");
}

// As Python's json.dump() writes it. Keys that have a meaning for it take the text.
TEST(Hjson, InfinityIsAText) {
  EXPECT_EQ(read("{\"a\": Infinity, \"b\": 1}"), nlohmann::ordered_json::parse(R"({"a": "Infinity", "b": 1})"));
}

TEST(Hjson, NamesTypographicQuotes) {
  EXPECT_THAT(refusal("{\n\u201Clr\u201D: 1}"),
              HasSubstr("test.json:2:1: expected a plain quotation mark (\"), found '\u201C', a typographic one"));
  EXPECT_THAT(refusal("{\"type\": \u2018AdamW\u2019}"), HasSubstr("test.json:1:10: expected a plain quotation mark"));
  EXPECT_EQ(read("{\"a\": \"\u201Cx\u201D\", b: it\u2019s\n}")["b"], "it\u2019s");
}

TEST(Hjson, MessagesShowNoRawBytes) {
  EXPECT_THAT(refusal("{\"a\x1b[2J\" 1}"), Not(HasSubstr("\x1b")));
  EXPECT_THAT(refusal("{\"a\": 1} \x1b"), AllOf(HasSubstr("\\x1B"), Not(HasSubstr("\x1b"))));
  EXPECT_LT(refusal("{\"" + std::string(1 << 20, 'k') + "\" 1}").size(), 500U);
}

// Looking for each key among those before it would take minutes.
TEST(Hjson, ReadsAHundredThousandKeys) {
  std::string text = "{";
  for (int i = 0; i < 100'000; ++i) text += "\"key" + std::to_string(i) + "\": 1,\n";
  const HjsonDocument document = parse_hjson(text + "\"key7\": 2}", "test.json");
  EXPECT_EQ(document.root.size(), 100'000U);
  ASSERT_EQ(document.duplicates.size(), 1U);
  EXPECT_EQ(document.root.get_ref<const ordered_json::object_t&>().begin()[7].second, 2);
}

}  // namespace
}  // namespace ds
