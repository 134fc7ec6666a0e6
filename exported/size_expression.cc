#include "exported/size_expression.h"

#include <algorithm>
#include <cmath>

#include "core/ascii.h"
#include "core/check.h"
#include "core/number_text.h"
#include "core/shown_text.h"
#include "exported/number_functions.h"

namespace ds::exported {
namespace {

constexpr int kDeepestSize = 50;

// sympy's function -> Python's, of two numbers at a time.
const std::map<std::string, std::string>& size_functions() {
  static const std::map<std::string, std::string> kFunctions = {
      {"Add", "_operator.add"},          {"Mul", "_operator.mul"},       {"Pow", "_operator.pow"},
      {"Mod", "_operator.mod"},          {"PythonMod", "_operator.mod"}, {"FloorDiv", "_operator.floordiv"},
      {"Max", "torch.sym_max"},          {"Min", "torch.sym_min"},       {"PowByNatural", "_operator.pow"},
      {"CleanDiv", "_operator.floordiv"}};
  return kFunctions;
}

double to_double(int64_t number) { return static_cast<double>(number); }

// Whether the result of whole numbers fits in an int64_t. `exact`: what floating-point numbers give, which do not wrap.
bool is_size(double exact) {
  constexpr double kLargest = 9.2e18;  // less than the end of int64_t by more than a rounding
  return std::abs(exact) <= kLargest;
}

[[noreturn]] void fail_size(const std::string& text, const std::string& what) {
  throw IoError(cat("the size \"", shown_text(text), "\" ", what, "; export the model with dynamic dimensions of ",
                    "torch.export.Dim alone"));
}

bool is_in_word(char c) { return is_ascii_letter(c) || is_ascii_digit(c) || c == '_' || c == '.' || c == '-'; }

std::string word_at(const std::string& text, size_t& at) {
  while (at < text.size() && text[at] == ' ') ++at;
  const size_t begin = at;
  while (at < text.size() && is_in_word(text[at])) ++at;
  return text.substr(begin, at - begin);
}

// Skips `c`, which has to be there.
void take(const std::string& text, size_t& at, char c) {
  if (at >= text.size() || text[at] != c) fail_size(text, cat("has no \"", c, "\" at character ", at));
  ++at;
}

// "'s77'" and what follows up to the bracket that ends it: ", positive=True, integer=True)".
std::string symbol_at(const std::string& text, size_t& at) {
  take(text, at, '\'');
  const size_t end = text.find('\'', at);
  const size_t close = text.find(')', at);
  if (end == std::string::npos || close == std::string::npos || close < end) fail_size(text, "does not end");
  std::string name = text.substr(at, end - at);
  at = close + 1;
  return name;
}

}  // namespace

SizeExpression::SizeExpression(const std::string& text) {
  size_t at = 0;
  *this = parse(text, at, 0);
  if (at != text.size()) fail_size(text, cat("goes on behind its end at character ", at));
}

SizeExpression SizeExpression::parse(const std::string& text, size_t& at, int depth) {
  if (depth > kDeepestSize) fail_size(text, "has too many brackets");
  SizeExpression result;
  const std::string word = word_at(text, at);
  if (at == text.size() || text[at] != '(') {
    // A bare number, or the text of another printer: "s77".
    const std::optional<int64_t> number = parse_whole_number(word);
    if (number) {
      result.number_ = *number;
    } else {
      if (word.empty() || !is_ascii_letter(word[0])) fail_size(text, cat("has no number or symbol at character ", at));
      result.symbol_ = word;
    }
    return result;
  }
  ++at;
  if (word == "Symbol") {
    result.symbol_ = symbol_at(text, at);
    return result;
  }
  if (word == "Integer") {
    const std::optional<int64_t> number = parse_whole_number(word_at(text, at));
    if (!number) fail_size(text, "has an integer that is none");
    result.number_ = *number;
    take(text, at, ')');
    return result;
  }
  if (!size_functions().contains(word)) fail_size(text, cat("has the unknown function \"", shown_text(word), "\""));
  result.function_ = word;
  while (true) {
    result.parts_.push_back(parse(text, at, depth + 1));
    if (at < text.size() && text[at] == ')') break;
    take(text, at, ',');
  }
  ++at;
  return result;
}

std::string SizeExpression::in_words() const {
  if (!symbol_.empty()) return symbol_;
  if (parts_.empty()) return cat(number_);
  const bool infix = function_ == "Add" || function_ == "Mul";
  std::string result = infix ? "" : cat(function_, "(");
  for (size_t i = 0; i < parts_.size(); ++i) {
    if (i > 0) result += infix ? (function_ == "Add" ? " + " : "*") : ", ";
    result += parts_[i].in_words();
  }
  return infix ? result : result + ")";
}

std::set<std::string> SizeExpression::symbols() const {
  std::set<std::string> result;
  if (!symbol_.empty()) result.insert(symbol_);
  for (const SizeExpression& part : parts_) result.merge(part.symbols());
  return result;
}

std::optional<std::pair<std::string, int64_t>> SizeExpression::solved(std::map<std::string, int64_t> symbols,
                                                                      int64_t value) const {
  std::string unknown;
  for (const std::string& symbol : this->symbols()) {
    if (symbols.contains(symbol)) continue;
    if (!unknown.empty()) return std::nullopt;
    unknown = symbol;
  }
  if (unknown.empty()) return std::nullopt;
  const auto at = [&](int64_t number) {
    symbols[unknown] = number;
    return this->value(symbols);
  };
  const std::optional<int64_t> first = at(1);
  const std::optional<int64_t> second = at(2);
  if (!first || !second || *second == *first || !is_size(to_double(*second) - to_double(*first)) ||
      !is_size(to_double(value) - to_double(*first)) || (value - *first) % (*second - *first) != 0) {
    return std::nullopt;
  }
  const int64_t number = (value - *first) / (*second - *first) + 1;
  return at(number) == value ? std::optional(std::pair(unknown, number)) : std::nullopt;
}

std::optional<int64_t> SizeExpression::value(const std::map<std::string, int64_t>& symbols) const {
  if (!symbol_.empty()) {
    const auto found = symbols.find(symbol_);
    return found == symbols.end() ? std::nullopt : std::optional(found->second);
  }
  if (parts_.empty()) return number_;
  const NumberFunction function = number_function(size_functions().at(function_));
  std::optional<int64_t> result = parts_[0].value(symbols);
  for (size_t i = 1; i < parts_.size() && result; ++i) {
    const std::optional<int64_t> next = parts_[i].value(symbols);
    const bool divides =
        function_ == "Mod" || function_ == "PythonMod" || function_ == "FloorDiv" || function_ == "CleanDiv";
    if (!next || (divides && *next == 0)) return std::nullopt;
    const c10::IValue joined = function({*result, *next});
    // Whole numbers wrap around where floating-point ones do not.
    if (!joined.isInt() || !is_size(function({to_double(*result), to_double(*next)}).toDouble())) return std::nullopt;
    result = joined.toInt();
  }
  return result;
}

}  // namespace ds::exported
