#include "core/json/near_miss.h"

#include <algorithm>
#include <vector>

namespace ds {
namespace {

constexpr size_t kMostEdits = 2;

std::string normalized(std::string_view word) {
  std::string out;
  for (const char c : word) {
    if (c == '_' || c == '-' || c == ' ') continue;
    out += c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  }
  return out;
}

}  // namespace

// Damerau's distance in its "optimal string alignment" form.
size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::vector<size_t>> cost(a.size() + 1, std::vector<size_t>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); ++i) cost[i][0] = i;
  for (size_t j = 0; j <= b.size(); ++j) cost[0][j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t substitution = cost[i - 1][j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      cost[i][j] = std::min({cost[i - 1][j] + 1, cost[i][j - 1] + 1, substitution});
      const bool swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
      if (swapped) cost[i][j] = std::min(cost[i][j], cost[i - 2][j - 2] + 1);
    }
  }
  return cost[a.size()][b.size()];
}

std::optional<std::string> near_miss(std::string_view word, std::span<const std::string> known) {
  const std::string target = normalized(word);
  std::optional<std::string> best;
  size_t best_cost = 0;
  for (const std::string& name : known) {
    const std::string candidate = normalized(name);
    const size_t allowed = std::min(kMostEdits, std::min(target.size(), candidate.size()) / 4);
    const size_t distance = edit_distance(target, candidate);
    if (distance > allowed) continue;
    const size_t cost = 2 * distance + (target.substr(0, 1) == candidate.substr(0, 1) ? 0 : 1);
    if (!best || cost < best_cost) {
      best = name;
      best_cost = cost;
    }
  }
  return best;
}

}  // namespace ds
