#include "tools/checkpoint/text_columns.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "core/check.h"
#include "core/number_text.h"

namespace ds::checkpoint::tool {

void print_columns(const std::vector<std::vector<std::string>>& rows, std::ostream& out) {
  std::vector<size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  for (const auto& row : rows) {
    out << "  ";
    for (size_t i = 0; i < row.size(); ++i) {
      out << row[i];
      if (i + 1 < row.size()) out << std::string(widths[i] - row[i].size() + 2, ' ');
    }
    out << '\n';
  }
}

std::string shown_bytes(int64_t bytes) {
  if (bytes < 1000) return cat(bytes, " B");
  auto value = static_cast<double>(bytes);
  size_t unit = 0;
  constexpr const char* kUnits[] = {"B", "KB", "MB", "GB", "TB"};
  while (value >= 999.95 && unit + 1 < std::size(kUnits)) {
    value /= 1000;
    ++unit;
  }
  return cat(fixed(value, 1), " ", kUnits[unit]);
}

int64_t parsed_bytes(const std::string& text) {
  static const std::map<std::string, double> kUnits = {
      {"", 1},      {"B", 1},           {"KB", 1e3},        {"MB", 1e6},        {"GB", 1e9},
      {"TB", 1e12}, {"KiB", 1LL << 10}, {"MiB", 1LL << 20}, {"GiB", 1LL << 30}, {"TiB", 1LL << 40}};
  if (const auto whole = parse_whole_number(text); whole && *whole >= 1) return *whole;  // 5e9
  const size_t end = text.find_first_not_of("0123456789.");
  const std::string number = text.substr(0, end);
  const auto unit =
      kUnits.find(end == std::string::npos ? "" : text.substr(std::min(text.find_first_not_of(' ', end), text.size())));
  const double value = parse_finite_number(number).value_or(0);
  const double bytes = unit == kUnits.end() ? 0 : value * unit->second;
  require<ConfigError>(bytes >= 1 && bytes < 9e18,
                       "--max_shard_size: expected a size such as 5GB, 500MB or 4GiB, found \"", text, "\"");
  return static_cast<int64_t>(bytes);
}

}  // namespace ds::checkpoint::tool
