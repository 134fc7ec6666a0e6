// What takes the place of reductions of gradients as they are: gradient_compression, and zero_quantized_gradients.
#pragma once

#include <c10/core/Device.h>

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

// What gradient_compression and sparse_gradients talk over.
struct CompressionGroups {
  // Ranks between which gradients are compressed: those of `shards` or, between nodes only, those of one place.
  compression::ExchangeGroups compressed;
  compression::NodeGroups node;  // between nodes only; else without communicators

  std::vector<std::shared_ptr<comm::Communicator>> all() const;
};

// Without communicators where neither is on. Collective over `shards`.
CompressionGroups make_compression_groups(const Plan& plan, const std::shared_ptr<comm::Communicator>& shards);

// Null: gradients are sent as they are. What it remembers is on `device`.
std::unique_ptr<comm::BucketReduction> make_gradient_reduction(const Plan& plan, const RankGroups& groups,
                                                               const std::vector<zero::ParameterBucket>& buckets,
                                                               const std::vector<ParameterInfo>& infos,
                                                               at::Device device);

}  // namespace ds::engine
