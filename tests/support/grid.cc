#include "tests/support/grid.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>

namespace ds::test {
namespace {

// Values of some axes together: their numbers, then the values.
using Combination = std::vector<size_t>;

std::vector<std::vector<size_t>> choices_of(size_t axes, size_t strength) {
  std::vector<std::vector<size_t>> result;
  std::vector<bool> chosen(axes);
  std::fill_n(chosen.begin(), std::min(axes, strength), true);
  do {
    std::vector<size_t> choice;
    for (size_t axis = 0; axis < axes; ++axis) {
      if (chosen[axis]) choice.push_back(axis);
    }
    result.push_back(std::move(choice));
  } while (std::prev_permutation(chosen.begin(), chosen.end()));
  return result;
}

std::vector<Combination> combinations_in(const GridCell& cell, const std::vector<std::vector<size_t>>& choices) {
  std::vector<Combination> result;
  for (const std::vector<size_t>& axes : choices) {
    Combination combination = axes;
    for (const size_t axis : axes) combination.push_back(cell[axis]);
    result.push_back(std::move(combination));
  }
  return result;
}

// Every count-th cell of a grid, beginning with cell number `first`.
struct Piece {
  size_t first = 0, count = 1;
};

// Empty where the sample is wanted.
std::optional<Piece> piece_of_environment() {
  const char* const wish = std::getenv("DS_TEST_GRID");
  if (wish == nullptr || *wish == '\0') return std::nullopt;
  if (std::string(wish) == "all") return Piece{};
  Piece piece;
  char after = 0;
  if (std::sscanf(wish, "%zu/%zu%c", &piece.first, &piece.count, &after) == 2 && piece.first < piece.count)
    return piece;
  throw std::invalid_argument("DS_TEST_GRID: expected \"all\", K/N with K below N, or nothing, found \"" +
                              std::string(wish) + "\"");
}

}  // namespace

std::vector<GridCell> all_cells(const std::vector<size_t>& sizes) {
  std::vector<GridCell> cells{{}};
  for (const size_t size : sizes) {
    std::vector<GridCell> longer;
    for (const GridCell& cell : cells) {
      for (size_t value = 0; value < size; ++value) {
        longer.push_back(cell);
        longer.back().push_back(value);
      }
    }
    cells = std::move(longer);
  }
  return cells;
}

// Greedy: always the first cell among those that bring most combinations which are missing.
std::vector<GridCell> covering_cells(const std::vector<size_t>& sizes, size_t strength) {
  const std::vector<GridCell> cells = all_cells(sizes);
  const std::vector<std::vector<size_t>> choices = choices_of(sizes.size(), strength);
  std::vector<std::vector<Combination>> combinations;
  std::set<Combination> missing;
  for (const GridCell& cell : cells) {
    combinations.push_back(combinations_in(cell, choices));
    missing.insert(combinations.back().begin(), combinations.back().end());
  }
  std::set<GridCell> taken;
  while (!missing.empty()) {
    const auto brings = [&](const std::vector<Combination>& of) {
      return std::count_if(of.begin(), of.end(), [&](const Combination& each) { return missing.contains(each); });
    };
    const auto best = std::max_element(combinations.begin(), combinations.end(),
                                       [&](const auto& a, const auto& b) { return brings(a) < brings(b); });
    taken.insert(cells[static_cast<size_t>(best - combinations.begin())]);
    for (const Combination& each : *best) missing.erase(each);
  }
  return {taken.begin(), taken.end()};
}

bool whole_grid_wanted() {
  const std::optional<Piece> piece = piece_of_environment();
  return piece && piece->count == 1;
}

bool sample_wanted() { return !piece_of_environment(); }

std::vector<GridCell> wanted_cells(const std::vector<size_t>& sizes, size_t strength) {
  const std::optional<Piece> piece = piece_of_environment();
  if (!piece) return covering_cells(sizes, strength);
  const std::vector<GridCell> all = all_cells(sizes);
  std::vector<GridCell> cells;
  for (size_t number = piece->first % all.size(); number < all.size(); number += piece->count) {
    cells.push_back(all[number]);
  }
  return cells;
}

}  // namespace ds::test
