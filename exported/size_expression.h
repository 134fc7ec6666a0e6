// Sizes of inputs as torch.export writes them, in sympy's words: "Symbol('s77', positive=True, integer=True)",
// "Mul(Integer(2), Symbol('s0', integer=True))".
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace ds::exported {

// An expression over symbols. Whole numbers.
class SizeExpression {
 public:
  // Throws IoError for a text that is none, and for a function beside Add, Mul, Pow, Mod, FloorDiv, Max and Min.
  explicit SizeExpression(const std::string& text);

  // The symbol that the expression is; empty: it is something else.
  const std::string& symbol() const { return symbol_; }
  // All symbols in it.
  std::set<std::string> symbols() const;
  // As people write it: "s77", "2*s0".
  std::string in_words() const;
  // The value of its only unknown symbol with which the expression is `value`; none: there is no such number, or not
  // one unknown symbol. Exact for expressions that are linear in it, as those of dynamic dimensions are.
  std::optional<std::pair<std::string, int64_t>> solved(std::map<std::string, int64_t> symbols, int64_t value) const;
  // Its value; none: one of its symbols is not known, it divides by zero, or it does not fit in an int64_t.
  std::optional<int64_t> value(const std::map<std::string, int64_t>& symbols) const;

 private:
  SizeExpression() = default;
  static SizeExpression parse(const std::string& text, size_t& at, int depth);

  std::string function_;  // of an expression with parts
  std::string symbol_;
  int64_t number_ = 0;  // of a constant
  std::vector<SizeExpression> parts_;
};

}  // namespace ds::exported
