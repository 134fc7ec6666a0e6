#include "tools/bench/bandwidth.h"

#include <algorithm>
#include <charconv>
#include <string_view>

#include "core/check.h"
#include "core/number_text.h"

namespace ds::tool::bench {
namespace {

constexpr int64_t kMostBytes = int64_t{1} << 50;

bool has_parts(Operation operation) {
  return operation == Operation::kAllGather || operation == Operation::kReduceScatter ||
         operation == Operation::kAllToAll;
}

std::string all_names() {
  std::string names;
  for (const char* name : kOperationNames) names += cat(name, ", ");
  return names + "or all";
}

}  // namespace

const char* name_of(Operation operation) { return kOperationNames.at(static_cast<size_t>(operation)); }

std::vector<Operation> parse_operations(const std::string& text) {
  std::vector<Operation> operations;
  for (size_t i = 0; i < kOperationNames.size(); ++i) {
    if (text == "all" || text == kOperationNames[i]) operations.push_back(static_cast<Operation>(i));
  }
  require<ConfigError>(!operations.empty(), "expected ", lazy(all_names), ", found \"", text, "\"");
  return operations;
}

Amount amount_of(Operation operation, int64_t bytes, int64_t element_bytes, int ranks) {
  if (operation == Operation::kBarrier) return {};
  const int64_t parts = has_parts(operation) ? ranks : 1;
  const int64_t count = std::max<int64_t>(bytes / element_bytes / parts, 1);
  return {.count = count, .bytes = count * parts * element_bytes};
}

double bus_factor(Operation operation, int ranks) {
  const double n = ranks;
  switch (operation) {
    case Operation::kAllReduce:
      return 2 * (n - 1) / n;
    case Operation::kAllGather:
    case Operation::kReduceScatter:
    case Operation::kAllToAll:
      return (n - 1) / n;
    case Operation::kBroadcast:
    case Operation::kReduce:
    case Operation::kSendRecv:
      return 1;
    case Operation::kBarrier:
      break;
  }
  return 0;
}

double algorithm_bandwidth(int64_t bytes, double seconds) {
  return seconds > 0 ? static_cast<double>(bytes) / seconds / 1e9 : 0;
}

int64_t parse_size(const std::string& text, const std::string& flag) {
  constexpr std::string_view kUnits = "KMGT";
  if (const auto whole = parse_whole_number(text); whole && *whole > 0 && *whole <= kMostBytes) return *whole;  // 1e9
  int64_t value = 0;
  const char* const last = text.data() + text.size();
  const auto [end, error] = std::from_chars(text.data(), last, value);
  const auto unit = static_cast<char>(end < last && *end >= 'a' ? *end - 'a' + 'A' : (end < last ? *end : '\0'));
  const size_t power = kUnits.find(unit);
  const bool plain = error == std::errc() && end == last;
  const bool with_unit = error == std::errc() && end + 1 == last && power != std::string_view::npos;
  const int shift = with_unit ? 10 * static_cast<int>(power + 1) : 0;
  require<ConfigError>((plain || with_unit) && value > 0 && value <= kMostBytes >> shift, flag,
                       ": expected bytes such as 8, 1K, 64M or 2G (K = 1024), found \"", text, "\"");
  return value << shift;
}

std::vector<int64_t> size_steps(int64_t min, int64_t max, int64_t factor) {
  require<ConfigError>(min <= max, "--min: expected at most --max, found ", min, " and ", max, " bytes");
  require<ConfigError>(factor >= 2, "--factor: expected at least 2, found ", factor);
  std::vector<int64_t> sizes;
  for (int64_t bytes = min; bytes <= max; bytes *= factor) {
    sizes.push_back(bytes);
    if (bytes > max / factor) break;
  }
  return sizes;
}

}  // namespace ds::tool::bench
