#include "exported/number_functions.h"

#include <c10/core/Scalar.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>

#include "core/check.h"
#include "core/listed.h"

namespace ds::exported {
namespace {

using Numbers = std::vector<c10::IValue>;

const c10::IValue& number(const Numbers& numbers, size_t i) {
  require(i < numbers.size() && (numbers[i].isScalar() || numbers[i].isBool()), "expected a number as argument ", i,
          " of ", numbers.size());
  return numbers[i];
}

bool is_whole(const c10::IValue& value) { return value.isInt() || value.isBool(); }
int64_t whole(const Numbers& numbers, size_t i) {
  const c10::IValue& value = number(numbers, i);
  return value.isBool() ? int64_t{value.toBool()} : value.toInt();
}
double real(const Numbers& numbers, size_t i) {
  const c10::IValue& value = number(numbers, i);
  return is_whole(value) ? static_cast<double>(whole(numbers, i)) : value.toDouble();
}

int64_t floor_divide(int64_t a, int64_t b) {
  require(b != 0, "division of the size ", a, " by zero");
  if (b == -1) return static_cast<int64_t>(0 - static_cast<uint64_t>(a));
  return a / b - ((a % b != 0 && (a < 0) != (b < 0)) ? 1 : 0);
}

// Whole numbers overflow as sizes never do; the result is then a number, and not undefined.
struct Add {
  int64_t operator()(int64_t a, int64_t b) const {
    return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
  }
  double operator()(double a, double b) const { return a + b; }
};
struct Subtract {
  int64_t operator()(int64_t a, int64_t b) const {
    return static_cast<int64_t>(static_cast<uint64_t>(a) - static_cast<uint64_t>(b));
  }
  double operator()(double a, double b) const { return a - b; }
};
struct Multiply {
  int64_t operator()(int64_t a, int64_t b) const {
    return static_cast<int64_t>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
  }
  double operator()(double a, double b) const { return a * b; }
};
struct FloorDivide {
  int64_t operator()(int64_t a, int64_t b) const { return floor_divide(a, b); }
  double operator()(double a, double b) const { return std::floor(a / b); }
};
struct Modulo {
  int64_t operator()(int64_t a, int64_t b) const { return Subtract()(a, Multiply()(floor_divide(a, b), b)); }
  double operator()(double a, double b) const { return a - std::floor(a / b) * b; }
};
struct Larger {
  template <class T>
  T operator()(T a, T b) const {
    return std::max(a, b);
  }
};
struct Smaller {
  template <class T>
  T operator()(T a, T b) const {
    return std::min(a, b);
  }
};

// A whole number of whole numbers, else a floating-point one.
template <class Operation>
c10::IValue of_two(const Numbers& numbers) {
  if (is_whole(number(numbers, 0)) && is_whole(number(numbers, 1))) {
    return Operation()(whole(numbers, 0), whole(numbers, 1));
  }
  return Operation()(real(numbers, 0), real(numbers, 1));
}

template <class Relation>
c10::IValue compared(const Numbers& numbers) {
  if (is_whole(number(numbers, 0)) && is_whole(number(numbers, 1))) {
    return Relation()(whole(numbers, 0), whole(numbers, 1));
  }
  return Relation()(real(numbers, 0), real(numbers, 1));
}

c10::IValue divided(const Numbers& numbers) {
  require(real(numbers, 1) != 0, "division of ", real(numbers, 0), " by zero");
  return real(numbers, 0) / real(numbers, 1);
}

c10::IValue power(const Numbers& numbers) {
  if (!is_whole(number(numbers, 0)) || !is_whole(number(numbers, 1)) || whole(numbers, 1) < 0) {
    return std::pow(real(numbers, 0), real(numbers, 1));
  }
  int64_t result = 1;
  int64_t base = whole(numbers, 0);
  for (int64_t left = whole(numbers, 1); left > 0; left /= 2) {
    if (left % 2 == 1) result = Multiply()(result, base);
    base = Multiply()(base, base);
  }
  return result;
}

c10::IValue negated(const Numbers& numbers) {
  return is_whole(number(numbers, 0)) ? c10::IValue(Subtract()(int64_t{0}, whole(numbers, 0)))
                                      : c10::IValue(-real(numbers, 0));
}

c10::IValue magnitude(const Numbers& numbers) {
  return is_whole(number(numbers, 0)) && whole(numbers, 0) >= 0 ? number(numbers, 0)
         : is_whole(number(numbers, 0))                         ? negated(numbers)
                                                                : c10::IValue(std::abs(real(numbers, 0)));
}

// A floating-point number rounded to a whole one by `kRound`.
template <double (*kRound)(double)>
c10::IValue rounded(const Numbers& numbers) {
  if (is_whole(number(numbers, 0))) return whole(numbers, 0);
  const double value = kRound(real(numbers, 0));
  require(std::abs(value) < 9.2e18, "expected a number that fits in an int64, found ", value);
  return static_cast<int64_t>(value);
}
double up(double value) { return std::ceil(value); }
double down(double value) { return std::floor(value); }
double to_zero(double value) { return std::trunc(value); }
double to_even(double value) { return std::nearbyint(value); }

bool truth(const Numbers& numbers, size_t i) { return real(numbers, i) != 0; }

const std::map<std::string, NumberFunction>& functions() {
  static const std::map<std::string, NumberFunction> kFunctions = {
      {"_operator.add", of_two<Add>},
      {"_operator.sub", of_two<Subtract>},
      {"_operator.mul", of_two<Multiply>},
      {"_operator.floordiv", of_two<FloorDivide>},
      {"_operator.mod", of_two<Modulo>},
      {"_operator.truediv", divided},
      {"_operator.pow", power},
      {"_operator.neg", negated},
      {"_operator.pos", [](const Numbers& numbers) { return number(numbers, 0); }},
      {"_operator.abs", magnitude},
      {"_operator.eq", compared<std::equal_to<>>},
      {"_operator.ne", compared<std::not_equal_to<>>},
      {"_operator.lt", compared<std::less<>>},
      {"_operator.le", compared<std::less_equal<>>},
      {"_operator.gt", compared<std::greater<>>},
      {"_operator.ge", compared<std::greater_equal<>>},
      {"_operator.and_", [](const Numbers& n) { return c10::IValue(truth(n, 0) && truth(n, 1)); }},
      {"_operator.or_", [](const Numbers& n) { return c10::IValue(truth(n, 0) || truth(n, 1)); }},
      {"_operator.not_", [](const Numbers& n) { return c10::IValue(!truth(n, 0)); }},
      {"torch.sym_not", [](const Numbers& n) { return c10::IValue(!truth(n, 0)); }},
      {"torch.sym_max", of_two<Larger>},
      {"torch.sym_min", of_two<Smaller>},
      {"torch.sym_float", [](const Numbers& n) { return c10::IValue(real(n, 0)); }},
      {"torch.sym_int", rounded<to_zero>},
      {"torch._sym_sqrt", [](const Numbers& n) { return c10::IValue(std::sqrt(real(n, 0))); }},
      {"math.sqrt", [](const Numbers& n) { return c10::IValue(std::sqrt(real(n, 0))); }},
      {"math.ceil", rounded<up>},
      {"math.floor", rounded<down>},
      {"math.trunc", rounded<to_zero>},
      {"builtins.round", rounded<to_even>},
  };
  return kFunctions;
}

}  // namespace

bool is_number_function(const std::string& target) {
  return target.starts_with("_operator.") || target.starts_with("math.") || target.starts_with("torch.sym_") ||
         target.starts_with("torch._sym_") || target.starts_with("builtins.");
}

NumberFunction number_function(const std::string& target) {
  const auto found = functions().find(target);
  return found == functions().end() ? nullptr : found->second;
}

std::string known_number_functions() {
  std::vector<std::string> names;
  for (const auto& [name, function] : functions()) names.push_back(name);
  return listed(names, names.size());
}

}  // namespace ds::exported
