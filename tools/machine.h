// Ranks on nodes, and how fast bytes go between them. Pure arithmetic, torch-free.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace ds::tool {

struct Machine {
  int64_t ranks = 1;
  int64_t ranks_per_node = 8;  // ranks of one node are consecutive
  double flops = 0;            // operations a second that a rank achieves
  double node_rate = 0;        // bytes a second that a rank sends inside its node
  double link_rate = 0;  // bytes a second from a node to all others; its ranks share it, one rank alone has all of it
  double latency = 0;    // seconds that an empty message takes

  int64_t node_of(int64_t rank) const { return rank / ranks_per_node; }
  int64_t nodes() const { return (ranks + ranks_per_node - 1) / ranks_per_node; }
};

// The first neighbours on an axis of `size` neighbouring ranks that are on different nodes; empty: every axis lies
// inside a node. `size` divides the ranks of `machine`.
std::optional<std::pair<int64_t, int64_t>> first_crossing(const Machine& machine, int64_t size);
// The same in words for engine::PlanFacts::tensor_leaves_host: "ranks 2 (node 0) and 3 (node 1)"; empty: there are
// none.
std::string crossing_text(const Machine& machine, int64_t size);

// Whether every pipeline, `pipe` ranks as far apart as they can be, lies inside a node. `pipe` divides the ranks of
// `machine`.
bool pipelines_inside_nodes(const Machine& machine, int64_t pipe);

// The data-parallel ranks of a node that have the same place on their tensor axes of `tensor` ranks; 1 where this does
// not divide `dp`.
int64_t data_ranks_per_node(const Machine& machine, int64_t dp, int64_t tensor);

// A ring of ranks: each sends to the next, the last one to the first.
struct Ring {
  int64_t first = 0;
  int64_t members = 1;
  int64_t stride = 1;  // from a member to the next

  int64_t rank(int64_t member) const { return first + member % members * stride; }
};

// Messages that are sent at the same time. Ranks of one node that send to other nodes share its link. The machine
// outlives it.
class Traffic {
 public:
  explicit Traffic(const Machine& machine)
      : machine_(machine), leaving_(static_cast<size_t>(machine.nodes())), bytes_(leaving_) {}

  void add(int64_t from, int64_t to, int64_t bytes = 0);
  void add(const Ring& ring, int64_t bytes_of_member = 0);
  // Bytes a second between two ranks, once all messages are added.
  double rate(int64_t from, int64_t to) const;
  double rate(const Ring& ring) const;  // bytes a second of its slowest member
  // Bytes that leave each node.
  const std::vector<int64_t>& bytes() const { return bytes_; }

 private:
  const Machine& machine_;
  std::vector<int64_t> leaving_;  // number of senders to other nodes, of each node
  std::vector<int64_t> bytes_;
};

}  // namespace ds::tool
