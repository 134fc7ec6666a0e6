#include "core/json/hjson_text.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <regex>
#include <utility>

#include "core/check.h"
#include "core/shown_text.h"
#include "core/utf8.h"

namespace ds {
namespace {

constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";
constexpr size_t kLongestNumber = 400;
constexpr size_t kShownSwallowed = 60;
constexpr double kWholeNumberLimit = 1e10;  // the hjson package turns whole floats below it into integers

bool is_space(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }
bool is_line_end(char c) { return c == '\n' || c == '\r' || c == '\0'; }
bool is_punctuator(char c) { return c != '\0' && std::string_view("{}[],:").find(c) != std::string_view::npos; }

std::string_view trim_space(std::string_view text) {
  while (!text.empty() && is_space(text.front())) text.remove_prefix(1);
  while (!text.empty() && is_space(text.back())) text.remove_suffix(1);
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
    const auto value = nlohmann::ordered_json::parse(digits, nullptr, false);
    const bool fits = value.is_number_integer() && !(value.is_number_unsigned() && value.get<uint64_t>() > INT64_MAX);
    if (fits) return nlohmann::ordered_json(value.get<int64_t>());
    return nlohmann::ordered_json(std::strtod(digits.c_str(), nullptr));
  }
  const double value = std::strtod(digits.c_str(), nullptr);
  if (std::abs(value) < kWholeNumberLimit && std::trunc(value) == value) {
    return nlohmann::ordered_json(static_cast<int64_t>(value));
  }
  return nlohmann::ordered_json(value);
}

}  // namespace

HjsonText::HjsonText(std::string_view text, std::string name) : text_(text), name_(std::move(name)) {
  if (text_.starts_with(kByteOrderMark)) text_.remove_prefix(kByteOrderMark.size());
  line_starts_.push_back(0);
  for (size_t i = 0; i < text_.size(); ++i) {
    if (text_[i] == '\n') line_starts_.push_back(i + 1);
  }
  check_utf8();
}

void HjsonText::check_utf8() const {
  for (size_t i = 0; i < text_.size();) {
    const size_t length = utf8_length(text_.substr(i));
    if (length == 0 || text_[i] == '\0') fail(i, "expected UTF-8 text, found another byte; save the file as UTF-8");
    i += length;
  }
}

int HjsonText::line_of(size_t position) const {
  return static_cast<int>(std::upper_bound(line_starts_.begin(), line_starts_.end(), position) - line_starts_.begin());
}

void HjsonText::fail(size_t position, const std::string& message) const {
  const int line = line_of(position);
  const size_t start = line_starts_[static_cast<size_t>(line - 1)];
  const std::string_view before = text_.substr(start, std::min(position, text_.size()) - start);
  // Columns count characters, not bytes.
  const auto column = 1 + std::count_if(before.begin(), before.end(), [](char c) { return (c & 0xC0) != 0x80; });
  throw ConfigError(cat(name_, ":", line, ":", column, ": ", message));
}

std::string HjsonText::found() const {
  if (at_end()) return "the end of the file";
  if (peek() == '\n' || peek() == '\r') return "the end of the line";
  return cat("'", shown_text(text_.substr(position_, std::max<size_t>(1, utf8_length(text_.substr(position_))))), "'");
}

void HjsonText::skip_space_and_comments() {
  while (!at_end()) {
    if (is_space(peek())) {
      advance();
    } else if (peek() == '#' || starts_with("//")) {
      while (!is_line_end(peek())) advance();
    } else if (starts_with("/*")) {
      const size_t end = text_.find("*/", position_ + 2);
      if (end == std::string_view::npos) fail(position_, "expected '*/' to close the comment that begins here");
      position_ = end + 2;
    } else {
      return;
    }
  }
}

std::string HjsonText::read_key() {
  if (peek() == '"' || peek() == '\'') return read_quoted();
  const size_t begin = position_;
  while (peek() != ':') {
    if (at_end() || is_punctuator(peek())) {
      fail(position_, cat(position_ == begin ? "expected a key or the end of the object" : "expected ':' after the key",
                          ", found ", found()));
    }
    if (is_space(peek())) break;
    advance();
  }
  if (position_ == begin) fail(begin, "expected a key, found ':'; an empty key needs quotes");
  return std::string(text_.substr(begin, position_ - begin));
}

uint32_t HjsonText::read_hex4(size_t escape) {
  uint32_t code = 0;
  for (int i = 0; i < 4; ++i, advance()) {
    const char c = peek();
    const char lower = static_cast<char>(c | 0x20);
    if (c >= '0' && c <= '9') {
      code = code * 16 + static_cast<uint32_t>(c - '0');
    } else if (lower >= 'a' && lower <= 'f') {
      code = code * 16 + static_cast<uint32_t>(lower - 'a' + 10);
    } else {
      fail(escape, "expected four hexadecimal digits after \\u");
    }
  }
  return code;
}

void HjsonText::append_escape(std::string& out) {
  static constexpr std::string_view kNames = "\"'\\/bfnrt";
  static constexpr std::string_view kValues = "\"'\\/\b\f\n\r\t";
  const size_t escape = position_ - 1;  // the backslash
  if (peek() != 'u') {
    const size_t index = at_end() ? std::string_view::npos : kNames.find(peek());
    if (index == std::string_view::npos)
      fail(escape, cat("expected an escape such as \\n or \\\\, found \\ and ", found()));
    out += kValues[index];
    advance();
    return;
  }
  advance();
  uint32_t code = read_hex4(escape);
  if (code >= 0xD800 && code < 0xDC00 && starts_with("\\u")) {
    position_ += 2;
    const uint32_t low = read_hex4(escape);
    if (low < 0xDC00 || low > 0xDFFF) fail(escape, "expected a pair of surrogates, found the first of one only");
    code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
  }
  if (code >= 0xD800 && code <= 0xDFFF) fail(escape, "expected a character, found half of a surrogate pair");
  append_utf8(out, code);
}

std::string HjsonText::read_quoted() {
  const size_t begin = position_;
  const char quote = peek();
  std::string out;
  for (advance(); peek() != quote;) {
    const char c = peek();
    if (at_end() || c == '\n' || c == '\r') fail(begin, "the string that begins here is not closed on its line");
    if (static_cast<unsigned char>(c) < 0x20)
      fail(position_, "expected a tab or control character to be escaped in a string");
    advance();
    if (c == '\\') {
      append_escape(out);
    } else {
      out += c;
    }
  }
  advance();
  return out;
}

void HjsonText::skip_indent(size_t columns) {
  while (columns > 0 && (peek() == ' ' || peek() == '\t' || peek() == '\r')) {
    advance();
    --columns;
  }
}

std::string HjsonText::read_multiline() {
  const size_t begin = position_;
  const size_t indent = begin - line_starts_[static_cast<size_t>(line() - 1)];
  position_ += 3;
  skip_indent(std::numeric_limits<size_t>::max());
  if (peek() == '\n') {
    advance();
    skip_indent(indent);
  }
  std::string out;
  while (!starts_with("'''")) {
    if (at_end()) fail(begin, "the ''' string that begins here is not closed");
    const char c = peek();
    advance();
    if (c != '\r') out += c;
    if (c == '\n') skip_indent(indent);
  }
  position_ += 3;
  if (out.ends_with('\n')) out.pop_back();
  return out;
}

// The names that Python writes in place of JSON.
void HjsonText::refuse_no_json(size_t begin, std::string_view word) const {
  static constexpr std::array kNumbers = {"NaN", "nan", "Infinity", "-Infinity", "inf", "-inf"};
  if (std::find(kNumbers.begin(), kNumbers.end(), word) != kNumbers.end()) {
    fail(begin, cat("expected a value of JSON, found ", word,
                    "; write a finite number, or put it into quotes where a text is meant"));
  }
  if (is_line_end(peek())) return;  // a text, which may be read as true or false
  static constexpr std::array kWords = {std::pair("None", "null"), std::pair("True", "true"),
                                        std::pair("False", "false")};
  for (const auto& [python, json] : kWords) {
    if (word == python) fail(begin, cat("expected a value of JSON, found ", word, "; write ", json));
  }
}

// `4 "key": ...`: what follows the number is no part of a text.
void HjsonText::refuse_missing_comma(size_t begin, std::string_view word) const {
  const size_t end = std::min(word.find_first_of(" \t"), word.size());
  const std::string_view first = word.substr(0, end);
  const bool value = first == "null" || first == "true" || first == "false" || parse_number(first);
  std::string_view rest = trim_space(word.substr(end));
  if (!value || rest.empty() || (rest.front() != '"' && rest.front() != '\'')) return;
  const size_t close = rest.find(rest.front(), 1);
  if (close == std::string_view::npos || !trim_space(rest.substr(close + 1)).starts_with(':')) return;
  fail(begin + end, cat("expected a comma after ", shown_text(first), ", found the key ",
                        shown_text(rest.substr(0, close + 1)), "; put a comma between them"));
}

std::string HjsonText::swallowed() const {
  if (swallowing_.empty()) return "";
  const auto begin = static_cast<size_t>(swallowing_.data() - text_.data());
  return cat("the text without quotes in line ", line_of(begin), ", ", shown_text(swallowing_, kShownSwallowed),
             ", reaches to the end of its line: put it into quotes, or a comma after the value");
}

nlohmann::ordered_json HjsonText::read_quoteless() {
  const size_t begin = position_;
  if (at_end() || is_punctuator(peek())) fail(begin, cat("expected a value, found ", found()));
  while (true) {
    const char c = peek();
    if (is_line_end(c) || c == ',' || c == '}' || c == ']' || c == '#' || starts_with("//") || starts_with("/*")) {
      const std::string_view word = trim_space(text_.substr(begin, position_ - begin));
      if (word == "null") return nullptr;
      if (word == "true" || word == "false") return word == "true";
      refuse_no_json(begin, word);
      if (const auto number = parse_number(word)) {
        if (number->is_number_float() && !std::isfinite(number->get<double>()))
          fail(begin, "the number is out of range");
        return *number;
      }
      if (is_line_end(c)) {
        refuse_missing_comma(begin, word);
        if (word.find_first_of("}]") != std::string_view::npos) swallowing_ = word;
        return std::string(word);
      }
    }
    advance();
  }
}

}  // namespace ds
