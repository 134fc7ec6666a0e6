#include "model/state/gradient_compression.h"

#include <torch/nn/modules/embedding.h>

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <unordered_set>
#include <utility>

#include "comm/bucket_reduction.h"
#include "comm/quantized_collectives.h"
#include "comm/subgroups.h"
#include "compression/block_quantized_reduction.h"
#include "compression/dense_first.h"
#include "compression/power_sgd_reduction.h"
#include "compression/row_reduction.h"
#include "compression/sign_reduction.h"
#include "compression/top_k_reduction.h"
#include "config/split/layer_names.h"
#include "core/check.h"
#include "model/state/rank_groups.h"

namespace ds::engine {
namespace {

using config::CompressionMethod;

// Reduce-scatters gradients with a QuantizedReducer (qgZ of ZeRO++, Wang et al., arXiv:2306.10209). Remembers nothing.
// Throws UsageError for an all-reduce, but with one rank.
class QuantizedBucketReduction final : public comm::BucketReduction {
 public:
  explicit QuantizedBucketReduction(std::shared_ptr<const comm::QuantizedReducer> reducer)
      : reducer_(std::move(reducer)) {}

  comm::Work start(size_t /*bucket*/, const at::Tensor& output, const at::Tensor& gradient, comm::ReduceOp op,
                   std::string label) override {
    return reducer_->reduce_scatter(output, gradient, op, std::move(label));
  }

 private:
  std::shared_ptr<const comm::QuantizedReducer> reducer_;
};

// Whether the method works on whole parameters, so that one rank of a node takes the bucket.
bool needs_whole_parameters(CompressionMethod method) {
  return method == CompressionMethod::kPowerSgd || method == CompressionMethod::kSign;
}

compression::SignBucket sign_bucket(const zero::BucketLayout& layout) {
  compression::SignBucket bucket{.numel = layout.numel, .ranges = {}};
  for (const Segment& segment : layout.segments) bucket.ranges.push_back({segment.slice_offset, segment.length});
  return bucket;
}

// Makes the reduction from what the ranks that exchange compressed gradients have of each bucket.
class ReductionMaker {
 public:
  ReductionMaker(const Plan& plan, const CompressionGroups& groups, const std::vector<zero::ParameterBucket>& buckets,
                 const std::vector<ParameterInfo>& infos, at::Device device)
      : plan_(plan), groups_(groups), buckets_(buckets), infos_(infos), device_(device) {}

  std::unique_ptr<comm::BucketReduction> make() const {
    const config::GradientCompressionSection& section = plan_.compression;
    switch (section.method) {
      case CompressionMethod::kInt8:
        return std::make_unique<compression::BlockQuantizedReduction>(groups_.compressed, errors());
      case CompressionMethod::kTopK:
        return std::make_unique<compression::TopKReduction>(groups_.compressed.first, errors(), section.top_k);
      case CompressionMethod::kPowerSgd:
        return std::make_unique<compression::PowerSgdReduction>(groups_.compressed, errors(), matrices(), device_);
      case CompressionMethod::kSign:
        return std::make_unique<compression::SignReduction>(groups_.compressed.first, signs(), device_,
                                                            section.error_feedback);
      case CompressionMethod::kNone:
      case CompressionMethod::kFloat16:
      case CompressionMethod::kBFloat16:
        break;
    }
    ensure(false, "a plan compresses by a method that does");
    return nullptr;
  }

 private:
  // Elements of bucket `b`; 0 where another rank of the node takes it.
  int64_t numel(size_t b) const {
    const int64_t whole = buckets_[b].layout().numel;
    if (plan_.compression_node_ranks == 1) return whole;
    const int places = groups_.node.inside.size();
    if (!needs_whole_parameters(plan_.compression.method)) return compression::node_part_numel(whole, places);
    return compression::owner_of_bucket(b, places) == groups_.node.inside.rank() ? whole : 0;
  }

  compression::ErrorMemory errors() const {
    std::vector<int64_t> numels;
    for (size_t b = 0; b < buckets_.size(); ++b) numels.push_back(numel(b));
    return {std::move(numels), device_, plan_.compression.error_feedback};
  }

  std::vector<compression::MatrixBucket> matrices() const {
    std::vector<compression::MatrixBucket> result(buckets_.size());
    for (size_t b = 0; b < buckets_.size(); ++b) {
      const zero::BucketLayout& layout = buckets_[b].layout();
      if (numel(b) == 0) continue;
      result[b] = compression::matrices_of(layout.segments, infos_, layout.numel, plan_.compression.rank);
    }
    return result;
  }

  std::vector<compression::SignBucket> signs() const {
    std::vector<compression::SignBucket> result(buckets_.size());
    for (size_t b = 0; b < buckets_.size(); ++b) {
      if (numel(b) > 0) result[b] = sign_bucket(buckets_[b].layout());
    }
    return result;
  }

  const Plan& plan_;
  const CompressionGroups& groups_;
  const std::vector<zero::ParameterBucket>& buckets_;
  const std::vector<ParameterInfo>& infos_;
  at::Device device_;
};

}  // namespace

std::vector<std::shared_ptr<comm::Communicator>> CompressionGroups::all() const {
  return {compressed.first, compressed.second, node.inside.first, node.inside.second};
}

CompressionGroups make_compression_groups(const Plan& plan, const std::shared_ptr<comm::Communicator>& shards) {
  CompressionGroups groups;
  if (!plan.compression.compresses() && !plan.sparse_gradients) return groups;
  const int size = shards->size();
  const auto make = [&](const std::vector<std::vector<int>>& ranks, const char* name) {
    return comm::own_group(*shards, ranks, name);
  };
  if (plan.compression_node_ranks == 1) {
    groups.compressed = {shards, make(comm::consecutive_ranks(size, size), "compressed")};
    return groups;
  }
  const auto node_ranks = static_cast<int>(plan.compression_node_ranks);
  const auto nodes = comm::consecutive_ranks(size, node_ranks);
  const auto places = comm::ranks_of_one_place(size, node_ranks);
  groups.node = {.inside = {make(nodes, "gradients of a node"), make(nodes, "results of a node")},
                 .node = shards->rank() / node_ranks,
                 .nodes = size / node_ranks};
  groups.compressed = {make(places, "compressed"), make(places, "compressed again")};
  return groups;
}

std::unique_ptr<comm::BucketReduction> make_gradient_reduction(const Plan& plan, const RankGroups& groups,
                                                               const std::vector<zero::ParameterBucket>& buckets,
                                                               const std::vector<ParameterInfo>& infos,
                                                               at::Device device) {
  if (groups.quantized) return std::make_unique<QuantizedBucketReduction>(groups.quantized);
  if (!plan.compression.compresses()) return nullptr;
  auto reduction = ReductionMaker(plan, groups.compression, buckets, infos, device).make();
  if (plan.compression_node_ranks > 1) {
    const compression::NodeGroups& node = groups.compression.node;
    if (needs_whole_parameters(plan.compression.method)) {
      reduction = std::make_unique<compression::NodeOwnerReduction>(node, std::move(reduction));
    } else {
      reduction = std::make_unique<compression::NodeReduction>(node, std::move(reduction));
    }
  }
  if (plan.compression.start_step == 0) return reduction;
  return std::make_unique<compression::DenseFirst>(groups.shards, std::move(reduction), plan.compression.start_step);
}

namespace {

bool has_name_of_table(const std::string& parameter) {
  const std::string module = owner_of(parameter);
  return last_name(parameter) == "weight" && (is_word_embedding(module) || is_position_embedding(module));
}

}  // namespace

std::vector<int64_t> table_widths(const torch::nn::Module& module, const std::vector<zero::Parameter>& parameters) {
  std::unordered_set<const void*> tables;
  for (const std::shared_ptr<torch::nn::Module>& layer : module.modules()) {
    if (const auto* embedding = layer->as<torch::nn::EmbeddingImpl>()) {
      tables.insert(embedding->weight.unsafeGetTensorImpl());
    } else if (const auto* bag = layer->as<torch::nn::EmbeddingBagImpl>()) {
      tables.insert(bag->weight.unsafeGetTensorImpl());
    }
  }
  std::vector<int64_t> widths;
  for (const zero::Parameter& parameter : parameters) {
    const bool of_layer =
        tables.contains(parameter.tensor.unsafeGetTensorImpl()) || parameter.name_that(has_name_of_table) != nullptr;
    const bool is_table = of_layer && parameter.tensor.dim() == 2 && parameter.tensor.numel() > 0;
    widths.push_back(is_table ? parameter.tensor.size(1) : 0);
  }
  return widths;
}

std::vector<int> parts_by_width(const std::vector<int64_t>& widths) {
  std::map<int64_t, int> part_of = {{0, 0}};
  std::vector<int> parts;
  for (const int64_t width : widths)
    parts.push_back(part_of.emplace(width, static_cast<int>(part_of.size())).first->second);
  return parts;
}

std::unique_ptr<comm::BucketReduction> make_row_reduction(const compression::ExchangeGroups& groups,
                                                          const std::vector<zero::ParameterBucket>& buckets,
                                                          const std::vector<int64_t>& widths) {
  std::vector<compression::RowBucket> rows;
  for (const zero::ParameterBucket& bucket : buckets) {
    compression::RowBucket& own = rows.emplace_back();
    for (const Segment& segment : bucket.layout().segments) {
      own.width = widths[static_cast<size_t>(segment.parameter)];
      if (own.width > 0) own.matrices.push_back({segment.slice_offset, segment.length / own.width});
    }
  }
  const bool any = std::any_of(rows.begin(), rows.end(), [](const auto& bucket) { return !bucket.matrices.empty(); });
  return any ? std::make_unique<compression::RowReduction>(groups, std::move(rows)) : nullptr;
}

}  // namespace ds::engine
