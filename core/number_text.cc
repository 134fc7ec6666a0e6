#include "core/number_text.h"

#include <charconv>
#include <cmath>
#include <cstdlib>
#include <system_error>

#include "core/classic_scope.h"

namespace ds {
namespace {

template <class T>
std::optional<T> parse_all(std::string_view text) {
  if (text.starts_with('+')) text.remove_prefix(1);
  T value{};
  const auto [after, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || after != text.data() + text.size()) return std::nullopt;
  return value;
}

}  // namespace

std::optional<int64_t> parse_whole_number(std::string_view text) {
  if (const auto digits = parse_all<int64_t>(text)) return digits;
  // Digits alone that do not fit are out of range, not to be rounded.
  if (text.find_first_of("eE.") == std::string_view::npos) return std::nullopt;
  constexpr double kLimit = 9223372036854775808.0;  // 2^63
  const auto number = parse_finite_number(text);
  if (!number || std::trunc(*number) != *number || *number < -kLimit || *number >= kLimit) return std::nullopt;
  return static_cast<int64_t>(*number);
}

std::optional<double> parse_finite_number(std::string_view text) {
  const auto number = parse_all<double>(text);
  return number && std::isfinite(*number) ? number : std::nullopt;
}

double nearest_double(const std::string& number) {
  const ClassicScope scope;  // std::from_chars does not tell too large from too small
  return std::strtod(number.c_str(), nullptr);
}

}  // namespace ds
