// Reductions on two levels: gradients are added as they are inside a node, and what goes between nodes is compressed.
// Ranks are numbered node by node: rank = node * L + place, L ranks in a node.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/bucket_reduction.h"
#include "compression/exchange_groups.h"

namespace ds::compression {

struct NodeGroups {
  ExchangeGroups inside;  // the L ranks of this node, in the order of their places
  int node = 0;
  int nodes = 1;
};

// Elements of a bucket that a rank of NodeReduction takes to other nodes.
int64_t node_part_numel(int64_t numel, int ranks_of_node);

// Each rank takes one L-th of the bucket to other nodes: reduce-scatter inside, `across` on the own part with the ranks
// of the same place, then (all-reduce) an all-gather inside. For compressions that look at elements, not at parameters.
// Memory of a start(): a copy of the bucket for a reduce-scatter, or where L does not divide it.
class NodeReduction final : public comm::BucketReduction {
 public:
  // `across`: among the ranks of this place, on node_part_numel() elements of every bucket.
  NodeReduction(NodeGroups groups, std::unique_ptr<comm::BucketReduction> across);

  void begin_pass(int64_t step, double scale) override { across_->begin_pass(step, scale); }
  comm::Work start(size_t bucket, const at::Tensor& output, const at::Tensor& gradient, comm::ReduceOp op,
                   std::string label) override;
  std::vector<std::pair<std::string, at::Tensor>> memory() const override { return across_->memory(); }
  void forget() override { across_->forget(); }

 private:
  comm::Work all_reduce(size_t bucket, const at::Tensor& gradient, comm::ReduceOp op, const std::string& label);
  comm::Work reduce_scatter(size_t bucket, const at::Tensor& output, const at::Tensor& gradient, comm::ReduceOp op,
                            const std::string& label);

  NodeGroups groups_;
  std::unique_ptr<comm::BucketReduction> across_;
};

// The place that takes a bucket to other nodes in NodeOwnerReduction.
inline int owner_of_bucket(size_t bucket, int ranks_of_node) {
  return static_cast<int>(bucket % static_cast<size_t>(ranks_of_node));
}

// One rank takes the whole bucket to other nodes, the next rank the next bucket: reduce to it, `across` there, then a
// broadcast, or a scatter of the parts of this node's ranks. For compressions that look at whole parameters.
class NodeOwnerReduction final : public comm::BucketReduction {
 public:
  // `across`: among the ranks of this place, on the buckets that this place owns.
  NodeOwnerReduction(NodeGroups groups, std::unique_ptr<comm::BucketReduction> across);

  void begin_pass(int64_t step, double scale) override { across_->begin_pass(step, scale); }
  comm::Work start(size_t bucket, const at::Tensor& output, const at::Tensor& gradient, comm::ReduceOp op,
                   std::string label) override;
  std::vector<std::pair<std::string, at::Tensor>> memory() const override { return across_->memory(); }
  void forget() override { across_->forget(); }

 private:
  NodeGroups groups_;
  std::unique_ptr<comm::BucketReduction> across_;
};

}  // namespace ds::compression
