// The reductions that replace the plain ones of gradients: gradient_compression, zero_quantized_gradients, and
// sparse_gradients, which exchanges the rows of embedding tables alone.
#pragma once

#include <c10/core/Device.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "comm/bucket_reduction.h"
#include "compression/exchange_groups.h"
#include "compression/node_reduction.h"
#include "config/plan/plan.h"
#include "core/slices/segment.h"
#include "zero/parameter_bucket.h"

namespace ds::engine {

struct RankGroups;

// The groups over which gradient_compression and sparse_gradients exchange.
struct CompressionGroups {
  // Ranks between which gradients are compressed: those of `shards` or, between nodes only, those of one place.
  compression::ExchangeGroups compressed;
  compression::NodeGroups node;  // between nodes only; else without communicators

  std::vector<std::shared_ptr<comm::Communicator>> all() const;
};

// Makes the groups; without communicators where neither is on. Collective over `shards`.
CompressionGroups make_compression_groups(const Plan& plan, const std::shared_ptr<comm::Communicator>& shards);

// Makes the reduction that the plan asks for, with its memory on `device`. Null: gradients are sent as they are.
std::unique_ptr<comm::BucketReduction> make_gradient_reduction(const Plan& plan, const RankGroups& groups,
                                                               const std::vector<zero::ParameterBucket>& buckets,
                                                               const std::vector<ParameterInfo>& infos,
                                                               at::Device device);

// Returns for each trainable parameter the width of its rows, where it is the weight of a torch::nn::Embedding or
// EmbeddingBag of the module, or of a layer that is named as one (is_word_embedding()); else 0. Wrong guesses cost a
// count of rows.
std::vector<int64_t> table_widths(const torch::nn::Module& module, const std::vector<zero::Parameter>& parameters);

// Returns BucketOptions::parts with which tables of one width share buckets with no other parameter.
std::vector<int> parts_by_width(const std::vector<int64_t>& widths);

// Makes the reduction that takes the buckets of tables. Null where there are none.
std::unique_ptr<comm::BucketReduction> make_row_reduction(const compression::ExchangeGroups& groups,
                                                          const std::vector<zero::ParameterBucket>& buckets,
                                                          const std::vector<int64_t>& widths);

}  // namespace ds::engine
