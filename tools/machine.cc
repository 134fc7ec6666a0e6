#include "tools/machine.h"

#include <algorithm>
#include <limits>

#include "core/text.h"
#include "tools/checked_count.h"

namespace ds::tool {

std::optional<std::pair<int64_t, int64_t>> first_crossing(const Machine& machine, int64_t size) {
  for (int64_t first = 0; first < machine.ranks; first += size) {
    for (int64_t rank = first + 1; rank < first + size; ++rank) {
      if (machine.node_of(rank - 1) != machine.node_of(rank)) return std::pair{rank - 1, rank};
    }
  }
  return std::nullopt;
}

std::string crossing_text(const Machine& machine, int64_t size) {
  const auto crossing = first_crossing(machine, size);
  if (!crossing) return {};
  return cat("ranks ", crossing->first, " (node ", machine.node_of(crossing->first), ") and ", crossing->second,
             " (node ", machine.node_of(crossing->second), ")");
}

bool pipelines_inside_nodes(const Machine& machine, int64_t pipe) {
  const int64_t stride = machine.ranks / pipe;
  for (int64_t first = 0; first < stride; ++first) {
    if (machine.node_of(first) != machine.node_of(first + (pipe - 1) * stride)) return false;
  }
  return true;
}

int64_t data_ranks_per_node(const Machine& machine, int64_t dp, int64_t tensor) {
  const int64_t ranks = std::clamp<int64_t>(machine.ranks_per_node / tensor, 1, dp);
  return dp % ranks == 0 ? ranks : 1;
}

void Traffic::add(int64_t from, int64_t to, int64_t bytes) {
  const int64_t node = machine_.node_of(from);
  if (node == machine_.node_of(to)) return;
  ++leaving_[static_cast<size_t>(node)];
  int64_t& sum = bytes_[static_cast<size_t>(node)];
  sum = checked_sum(sum, bytes, "what a node sends in a step");
}

void Traffic::add(const Ring& ring, int64_t bytes_of_member) {
  for (int64_t i = 0; i < ring.members; ++i) add(ring.rank(i), ring.rank(i + 1), bytes_of_member);
}

double Traffic::rate(int64_t from, int64_t to) const {
  const int64_t node = machine_.node_of(from);
  if (node == machine_.node_of(to)) return machine_.node_rate;
  const auto share = machine_.link_rate / static_cast<double>(leaving_[static_cast<size_t>(node)]);
  return std::min(machine_.node_rate, share);
}

double Traffic::rate(const Ring& ring) const {
  double slowest = std::numeric_limits<double>::infinity();
  for (int64_t i = 0; i < ring.members; ++i) slowest = std::min(slowest, rate(ring.rank(i), ring.rank(i + 1)));
  return slowest;
}

}  // namespace ds::tool
