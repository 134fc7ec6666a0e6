// Numbers as people type them. Torch-free.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace ds {

// "4096", "1e9", "2.5e3", "+7", "-3": a whole number that an int64_t holds; nothing for other text.
std::optional<int64_t> parse_whole_number(std::string_view text);
// Finite; nothing for other text.
std::optional<double> parse_finite_number(std::string_view text);

}  // namespace ds
