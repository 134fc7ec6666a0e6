// Sizes of inputs as torch.export writes them, in sympy's words: "Symbol('s77', positive=True, integer=True)",
// "Mul(Integer(2), Symbol('s0', integer=True))".
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace ds::exported {

// An expression over symbols. Whole numbers.
class SizeExpression {
 public:
  // Throws IoError for a text that is none, and for a function beside Add, Mul, Pow, Mod, FloorDiv, Max and Min.
  explicit SizeExpression(const std::string& text);

  // The symbol that the expression is; empty: it is something else.
  const std::string& symbol() const { return symbol_; }
  const std::vector<SizeExpression>& parts() const { return parts_; }
  // As people write it: "s77", "2*s0".
  std::string in_words() const;
  // Its value; none: one of its symbols is not known, or it divides by zero.
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
