#include "core/json/near_miss.h"

#include <algorithm>
#include <utility>

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
size_t edit_distance(std::string_view a, std::string_view b, size_t most) {
  if (std::max(a.size(), b.size()) - std::min(a.size(), b.size()) > most) return most + 1;
  std::vector<size_t> two_before(b.size() + 1);
  std::vector<size_t> before(b.size() + 1);
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    two_before.swap(before);
    before.swap(row);
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t substitution = before[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      row[j] = std::min({before[j] + 1, row[j - 1] + 1, substitution});
      const bool swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
      if (swapped) row[j] = std::min(row[j], two_before[j - 2] + 1);
    }
    // Rows grow from here on, but for a swap, which goes back by two.
    const size_t least = *std::min_element(row.begin(), row.end());
    if (least > most && *std::min_element(before.begin(), before.end()) > most) return least;
  }
  return row[b.size()];
}

NearMisses::NearMisses(std::span<const std::string> known) {
  for (const std::string& name : known) names_.push_back({name, normalized(name)});
}

std::optional<std::string> NearMisses::of(std::string_view word) const {
  const std::string target = normalized(word);
  const Name* best = nullptr;
  size_t best_cost = 0;
  for (const Name& name : names_) {
    const size_t allowed = std::min(kMostEdits, std::min(target.size(), name.letters.size()) / 4);
    const size_t distance = edit_distance(target, name.letters, allowed);
    if (distance > allowed) continue;
    const size_t cost = 2 * distance + (target.substr(0, 1) == name.letters.substr(0, 1) ? 0 : 1);
    if (best == nullptr || cost < best_cost) {
      best = &name;
      best_cost = cost;
    }
  }
  return best == nullptr ? std::nullopt : std::optional(best->text);
}

std::optional<std::string> near_miss(std::string_view word, std::span<const std::string> known) {
  return NearMisses(known).of(word);
}

}  // namespace ds
