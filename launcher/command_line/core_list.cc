#include "launcher/command_line/core_list.h"

#include <algorithm>
#include <charconv>
#include <ostream>

#include "core/check.h"

namespace ds::launcher {
namespace {

constexpr int kLargestCore = 65535;

int parse_core(std::string_view word, std::string_view list) {
  int core = -1;
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), core);
  require<ConfigError>(error == std::errc() && end == word.data() + word.size() && core >= 0 && core <= kLargestCore,
                       "core list '", list, "': expected core numbers and ranges such as 0-3,8, found '", word, "'");
  return core;
}

}  // namespace

std::vector<int> parse_core_list(std::string_view text) {
  std::vector<int> cores;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const std::string_view item = text.substr(begin, end - begin);
    const size_t dash = item.find('-');
    const int first = parse_core(item.substr(0, dash), text);
    const int last = dash == std::string_view::npos ? first : parse_core(item.substr(dash + 1), text);
    require<ConfigError>(first <= last, "core list '", text, "': the range ", item, " runs backward; write ", last, "-",
                         first);
    for (int core = first; core <= last; ++core) {
      require<ConfigError>(std::find(cores.begin(), cores.end(), core) == cores.end(), "core list '", text, "': core ",
                           core, " is named twice");
      cores.push_back(core);
    }
    begin = end + 1;
  }
  return cores;
}

std::ostream& operator<<(std::ostream& out, const CoreRanges& ranges) {
  const std::vector<int>& cores = ranges.cores;
  for (size_t first = 0; first < cores.size();) {
    size_t last = first;
    while (last + 1 < cores.size() && cores[last + 1] == cores[last] + 1) ++last;
    out << (first == 0 ? "" : ",") << cores[first];
    if (last > first) out << '-' << cores[last];
    first = last + 1;
  }
  return out;
}

std::string core_list_text(const std::vector<int>& cores) { return cat(CoreRanges{cores}); }

}  // namespace ds::launcher
