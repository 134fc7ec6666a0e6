#include "model/state/embedding_rows.h"

#include <torch/nn/modules/embedding.h>

#include <algorithm>
#include <map>
#include <unordered_set>
#include <utility>

#include "compression/row_reduction.h"
#include "config/split/layer_names.h"

namespace ds::engine {
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
    const bool of_layer = tables.contains(parameter.tensor.unsafeGetTensorImpl()) || has_name_of_table(parameter.name);
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
