#include "core/json/hjson_scalars.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <regex>
#include <utility>

#include "core/check.h"
#include "core/json/json_types.h"
#include "core/json/parse_json.h"
#include "core/number_text.h"
#include "core/shown_text.h"

namespace ds {
namespace {

constexpr size_t kLongestNumber = 400;
constexpr size_t kShownSwallowed = 60;
constexpr double kWholeNumberLimit = 1e10;  // the hjson package turns whole floats below it into integers

bool is_punctuator(char c) { return c != '\0' && std::string_view("{}[],:").find(c) != std::string_view::npos; }

std::string_view trim_space(std::string_view text) {
  while (!text.empty() && is_hjson_space(text.front())) text.remove_prefix(1);
  while (!text.empty() && is_hjson_space(text.back())) text.remove_suffix(1);
  return text;
}

void append_utf8(std::string& out, uint32_t code) {
  if (code < 0x80) {
    out += static_cast<char>(code);
  } else if (code < 0x800) {
    out += static_cast<char>(0xC0 | (code >> 6));
    out += static_cast<char>(0x80 | (code & 0x3F));
  } else if (code < 0x10000) {
    out += static_cast<char>(0xE0 | (code >> 12));
    out += static_cast<char>(0x80 | ((code >> 6) & 0x3F));
    out += static_cast<char>(0x80 | (code & 0x3F));
  } else {
    out += static_cast<char>(0xF0 | (code >> 18));
    out += static_cast<char>(0x80 | ((code >> 12) & 0x3F));
    out += static_cast<char>(0x80 | ((code >> 6) & 0x3F));
    out += static_cast<char>(0x80 | (code & 0x3F));
  }
}

// A number as the hjson package reads it; nothing when the text is no number. inf when it does not fit a double.
std::optional<nlohmann::ordered_json> parse_number(std::string_view text) {
  static const std::regex kPattern(R"((-?(?:0|[1-9][0-9]*))(\.[0-9]+)?([eE][-+]?[0-9]+)?)");
  std::match_results<std::string_view::const_iterator> match;
  if (text.size() > kLongestNumber) return std::nullopt;
  if (!std::regex_match(text.begin(), text.end(), match, kPattern)) return std::nullopt;
  const std::string digits(text);
  if (!match[2].matched && !match[3].matched) {
    const auto value = parse_json<nlohmann::ordered_json>(digits, nullptr, false);
    const bool fits = value.is_number_integer() && !(value.is_number_unsigned() && value.get<uint64_t>() > INT64_MAX);
    if (fits) return nlohmann::ordered_json(value.get<int64_t>());
    return nlohmann::ordered_json(nearest_double(digits));
  }
  const double value = nearest_double(digits);
  if (std::abs(value) < kWholeNumberLimit && std::trunc(value) == value) {
    return nlohmann::ordered_json(static_cast<int64_t>(value));
  }
  return nlohmann::ordered_json(value);
}

}  // namespace

std::string HjsonScalars::read_key() {
  refuse_typographic_quote();
  if (text_.peek() == '"' || text_.peek() == '\'') return read_quoted();
  const size_t begin = text_.position();
  while (text_.peek() != ':') {
    if (text_.at_end() || is_punctuator(text_.peek())) {
      text_.fail(text_.position(), cat(text_.position() == begin ? "expected a key or the end of the object"
                                                                 : "expected ':' after the key",
                                       ", found ", text_.found()));
    }
    if (is_hjson_space(text_.peek())) break;
    text_.advance();
  }
  if (text_.position() == begin) text_.fail(begin, "expected a key, found ':'; an empty key needs quotes");
  return std::string(text_.since(begin));
}

uint32_t HjsonScalars::read_hex4(size_t escape) {
  uint32_t code = 0;
  for (int i = 0; i < 4; ++i, text_.advance()) {
    const char c = text_.peek();
    const char lower = static_cast<char>(c | 0x20);
    if (c >= '0' && c <= '9') {
      code = code * 16 + static_cast<uint32_t>(c - '0');
    } else if (lower >= 'a' && lower <= 'f') {
      code = code * 16 + static_cast<uint32_t>(lower - 'a' + 10);
    } else {
      text_.fail(escape, "expected four hexadecimal digits after \\u");
    }
  }
  return code;
}

void HjsonScalars::append_escape(std::string& out) {
  static constexpr std::string_view kNames = "\"'\\/bfnrt";
  static constexpr std::string_view kValues = "\"'\\/\b\f\n\r\t";
  const size_t escape = text_.position() - 1;  // the backslash
  if (text_.peek() != 'u') {
    const size_t index = text_.at_end() ? std::string_view::npos : kNames.find(text_.peek());
    if (index == std::string_view::npos)
      text_.fail(escape, cat("expected an escape such as \\n or \\\\, found \\ and ", text_.found()));
    out += kValues[index];
    text_.advance();
    return;
  }
  text_.advance();
  uint32_t code = read_hex4(escape);
  if (code >= 0xD800 && code < 0xDC00 && text_.starts_with("\\u")) {
    text_.advance(2);
    const uint32_t low = read_hex4(escape);
    if (low < 0xDC00 || low > 0xDFFF) text_.fail(escape, "expected a pair of surrogates, found the first of one only");
    code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
  }
  if (code >= 0xD800 && code <= 0xDFFF) text_.fail(escape, "expected a character, found half of a surrogate pair");
  append_utf8(out, code);
}

std::string HjsonScalars::read_quoted() {
  const size_t begin = text_.position();
  const char quote = text_.peek();
  std::string out;
  for (text_.advance(); text_.peek() != quote;) {
    const char c = text_.peek();
    if (text_.at_end() || c == '\n' || c == '\r')
      text_.fail(begin, "the string that begins here is not closed on its line");
    if (static_cast<unsigned char>(c) < 0x20)
      text_.fail(text_.position(), "expected a tab or control character to be escaped in a string");
    text_.advance();
    if (c == '\\') {
      append_escape(out);
    } else {
      out += c;
    }
  }
  text_.advance();
  return out;
}

void HjsonScalars::skip_indent(size_t columns) {
  while (columns > 0 && (text_.peek() == ' ' || text_.peek() == '\t' || text_.peek() == '\r')) {
    text_.advance();
    --columns;
  }
}

std::string HjsonScalars::read_multiline() {
  const size_t begin = text_.position();
  const size_t indent = text_.indent();
  text_.advance(3);
  skip_indent(std::numeric_limits<size_t>::max());
  if (text_.peek() == '\n') {
    text_.advance();
    skip_indent(indent);
  }
  std::string out;
  while (!text_.starts_with("'''")) {
    if (text_.at_end()) text_.fail(begin, "the ''' string that begins here is not closed");
    const char c = text_.peek();
    text_.advance();
    if (c != '\r') out += c;
    if (c == '\n') skip_indent(indent);
  }
  text_.advance(3);
  if (out.ends_with('\n')) out.pop_back();
  return out;
}

// Word processors and chats put these in place of " and '. What begins with one would be a key or a text with the marks
// in it, which no setting has.
void HjsonScalars::refuse_typographic_quote() const {
  static constexpr std::array kQuotes = {"\u201C", "\u201D", "\u201E", "\u2018",
                                         "\u2019", "\u201A", "\u00AB", "\u00BB"};
  if (std::any_of(kQuotes.begin(), kQuotes.end(), [&](const char* quote) { return text_.starts_with(quote); })) {
    text_.fail(text_.position(), cat("expected a plain quotation mark (\"), found ", text_.found(),
                                     ", a typographic one; write \" on both sides"));
  }
}

// The names that Python writes in place of JSON. Infinity is let through as a text, for keys that take it as "never".
void HjsonScalars::refuse_no_json(size_t begin, std::string_view word) const {
  static constexpr std::array kNumbers = {"NaN", "nan", "-Infinity", "inf", "-inf"};
  if (std::find(kNumbers.begin(), kNumbers.end(), word) != kNumbers.end()) {
    text_.fail(begin, cat("expected a value of JSON, found ", word,
                          "; write a finite number, or put it into quotes where a text is meant"));
  }
  if (is_hjson_line_end(text_.peek())) return;  // a text, which may be read as true or false
  static constexpr std::array kWords = {std::pair("None", "null"), std::pair("True", "true"),
                                        std::pair("False", "false")};
  for (const auto& [python, json] : kWords) {
    if (word == python) text_.fail(begin, cat("expected a value of JSON, found ", word, "; write ", json));
  }
}

// `4 "key": ...`: what follows the number is no part of a text.
void HjsonScalars::refuse_missing_comma(size_t begin, std::string_view word) const {
  const size_t end = std::min(word.find_first_of(" \t"), word.size());
  const std::string_view first = word.substr(0, end);
  const bool value = first == "null" || first == "true" || first == "false" || parse_number(first);
  std::string_view rest = trim_space(word.substr(end));
  if (!value || rest.empty() || (rest.front() != '"' && rest.front() != '\'')) return;
  const size_t close = rest.find(rest.front(), 1);
  if (close == std::string_view::npos || !trim_space(rest.substr(close + 1)).starts_with(':')) return;
  text_.fail(begin + end, cat("expected a comma after ", shown_text(first), ", found the key ",
                              shown_text(rest.substr(0, close + 1)), "; put a comma between them"));
}

std::string HjsonScalars::swallowed() const {
  if (swallowing_.empty()) return "";
  return cat("the text without quotes in line ", swallowing_line_, ", ", shown_text(swallowing_, kShownSwallowed),
             ", reaches to the end of its line: put it into quotes, or a comma after the value");
}

nlohmann::ordered_json HjsonScalars::read_quoteless() {
  refuse_typographic_quote();
  const size_t begin = text_.position();
  if (text_.at_end() || is_punctuator(text_.peek())) text_.fail(begin, cat("expected a value, found ", text_.found()));
  while (true) {
    const char c = text_.peek();
    if (is_hjson_line_end(c) || c == ',' || c == '}' || c == ']' || c == '#' || text_.starts_with("//") ||
        text_.starts_with("/*")) {
      const std::string_view word = trim_space(text_.since(begin));
      if (word == "null") return nullptr;
      if (word == "true" || word == "false") return word == "true";
      if (word == kJsonInfinity) return std::string(word);
      refuse_no_json(begin, word);
      if (const auto number = parse_number(word)) {
        if (number->is_number_float() && !std::isfinite(number->get<double>()))
          text_.fail(begin, "the number is out of range");
        return *number;
      }
      if (is_hjson_line_end(c)) {
        refuse_missing_comma(begin, word);
        if (word.find_first_of("}]") != std::string_view::npos) {
          swallowing_ = word;
          swallowing_line_ = text_.line_of(begin);
        }
        return std::string(word);
      }
    }
    text_.advance();
  }
}

}  // namespace ds
