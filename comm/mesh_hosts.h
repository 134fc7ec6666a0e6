// Which axes of a grid of ranks stay inside hosts. Pure.
#pragma once

#include <string>
#include <vector>

namespace ds::comm {

// A grid of ranks: sizes from the outermost axis to the innermost; rank = place in row-major order.
struct GridShape {
  std::vector<int> sizes;

  int ranks() const;
  std::vector<int> coordinates(int rank) const;
  // Returns all groups of ranks that differ along these axes (by number) alone: a partition, each ascending, in the
  // order of their first ranks.
  std::vector<std::vector<int>> groups(const std::vector<size_t>& axes) const;
};

// Whether every group along the axis is on one host; `hosts` has a number for each rank.
bool inside_hosts(const GridShape& shape, size_t axis, const std::vector<int>& hosts);
// Names the first two neighbours along the axis that are on different hosts: "ranks 1 (host a) and 2 (host b)"; empty
// where every group is on one host. `names` has the name of each rank's host.
std::string crossing_text(const GridShape& shape, size_t axis, const std::vector<int>& hosts,
                          const std::vector<std::string>& names);
// Describes a grid: "dp 2 x tp 4; tp inside hosts, dp between them"; axes of one rank are left out.
std::string grid_text(const GridShape& shape, const std::vector<std::string>& names, const std::vector<int>& hosts);
// Returns what to change where the innermost axis leaves a host; empty where it does not.
std::string innermost_problem(const GridShape& shape, const std::vector<std::string>& names,
                              const std::vector<int>& hosts);

}  // namespace ds::comm
