// Parses numbers as people type them. Torch-free.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace ds {

// Parses a whole number that an int64_t holds: "4096", "1e9", "2.5e3", "+7", "-3"; nothing for other text.
std::optional<int64_t> parse_whole_number(std::string_view text);
// Parses a finite number; nothing for other text.
std::optional<double> parse_finite_number(std::string_view text);
// Returns the double nearest to a decimal number as JSON writes it: infinity or 0 where it is out of a double's range.
double nearest_double(const std::string& number);

}  // namespace ds
