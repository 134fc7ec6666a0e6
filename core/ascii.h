// Letters, digits and spaces of ASCII, the same under every locale: words of configs, variables and files are compared
// by these. Under tr_TR std::tolower leaves the I of "LION" as it is. Torch-free.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>

namespace ds {

constexpr char ascii_lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }

// Other characters than the letters A to Z stay as they are.
inline std::string ascii_lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](char c) { return ascii_lower(c); });
  return text;
}

constexpr bool is_ascii_digit(char c) { return c >= '0' && c <= '9'; }
constexpr bool is_ascii_letter(char c) { return ascii_lower(c) >= 'a' && ascii_lower(c) <= 'z'; }
// A space or one of \t \n \v \f \r.
constexpr bool is_ascii_space(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

// Tells whether two words differ in the case of letters alone.
inline bool equal_in_any_case(std::string_view a, std::string_view b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](char x, char y) { return ascii_lower(x) == ascii_lower(y); });
}

}  // namespace ds
