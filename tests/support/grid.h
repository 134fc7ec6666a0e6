// Chooses the cells of a grid of cases that a test runs: all of them with DS_TEST_GRID=all in the environment
// (`scripts/run_tests
// --all`), every N-th from cell K on with DS_TEST_GRID=K/N (a piece of the grid: `scripts/run_tests --piece K/N`; the
// pieces 0/N to N-1/N are the whole), otherwise a sample in which every combination of values of any two axes (or any
// three) occurs. What breaks for one combination of that many settings is then found by the sample; what takes more
// settings is left to the grid. The sample depends on the axes alone: it is the same on every machine and in every run.
// Torch-free.
#pragma once

#include <cstddef>
#include <tuple>
#include <utility>
#include <vector>

namespace ds::test {

// One index per axis.
using GridCell = std::vector<size_t>;

// Every cell of axes with so many values each, the last axis fastest.
std::vector<GridCell> all_cells(const std::vector<size_t>& sizes);

// In the order of all_cells: cells so that every combination of values of `strength` axes (at most all) is in one.
std::vector<GridCell> covering_cells(const std::vector<size_t>& sizes, size_t strength);

// The cells that DS_TEST_GRID asks for. Throws std::invalid_argument when it is neither unset, empty, "all" nor K/N
// with K below N.
std::vector<GridCell> wanted_cells(const std::vector<size_t>& sizes, size_t strength);

// Whether DS_TEST_GRID is "all". Throws as wanted_cells().
bool whole_grid_wanted();

// Whether DS_TEST_GRID asks for nothing, so that the sample is run. Throws as wanted_cells().
bool sample_wanted();

// The cells to run, as values. `strength`: of the sample.
template <class... Values>
std::vector<std::tuple<Values...>> grid_sample(size_t strength, const std::vector<Values>&... axes) {
  const std::vector<size_t> sizes{axes.size()...};
  const auto values_of = [&]<size_t... kAxis>(const GridCell& cell, std::index_sequence<kAxis...>) {
    return std::tuple<Values...>(axes[cell[kAxis]]...);
  };
  std::vector<std::tuple<Values...>> result;
  for (const GridCell& cell : wanted_cells(sizes, strength)) {
    result.push_back(values_of(cell, std::index_sequence_for<Values...>()));
  }
  return result;
}

}  // namespace ds::test
