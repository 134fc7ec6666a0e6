// Lists of CPU numbers as the kernel and numactl write them: "0-3,8". Pure.
#pragma once

#include <iosfwd>
#include <string>
#include <string_view>
#include <vector>

namespace ds::launcher {

// Parses such a list and keeps its order. Throws ConfigError for an empty list, a backward range, a number above 65535,
// a duplicate, or anything that is not a number.
std::vector<int> parse_core_list(std::string_view text);

// Prints {0, 1, 2, 5} as "0-2,5".
struct CoreRanges {
  const std::vector<int>& cores;
};
std::ostream& operator<<(std::ostream& out, const CoreRanges& ranges);

// The list as text: "0-2,5" for {0, 1, 2, 5}.
std::string core_list_text(const std::vector<int>& cores);

}  // namespace ds::launcher
