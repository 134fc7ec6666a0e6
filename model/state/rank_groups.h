// The groups of data-parallel ranks: which of them share a copy of the model state, which hold equal slices, and which
// serve one purpose alone. Groups along the other axes are in ranks.h.
#pragma once

#include <memory>

#include "comm/quantized_collectives.h"
#include "config/plan/plan.h"
#include "dsengine/comm.h"
#include "model/state/gradient_compression.h"

namespace ds::engine {

// The groups inside the data axis of this rank.
struct RankGroups {
  // Ranks that share one copy of the model state, each with its slice: all data-parallel ranks or, with
  // mics_shard_size, so many consecutive ones.
  std::shared_ptr<comm::Communicator> shards;
  // Ranks that hold equal slices of different copies, one of each `shards`; null when there is one copy.
  std::shared_ptr<comm::Communicator> replicas;
  // Stage 3: the ranks of `shards` again, for parameters alone; else null.
  std::shared_ptr<comm::Communicator> parameters;
  // zero_hpz_partition_size: so many consecutive ranks of `parameters`; else null.
  std::shared_ptr<comm::Communicator> node;
  // zero_quantized_gradients: over the ranks of `shards`; else null.
  std::shared_ptr<comm::QuantizedReducer> quantized;
  // gradient_compression: over the ranks of `shards`; else without communicators.
  CompressionGroups compression;
  // Converted BatchNorm layers: all data-parallel ranks; else null.
  std::shared_ptr<comm::Communicator> norms;
  // broadcast_buffers: all data-parallel ranks; else null.
  std::shared_ptr<comm::Communicator> buffers;
};

// Makes the groups that the plan asks for. Collective over `world`, the data-parallel ranks.
RankGroups make_rank_groups(const Plan& plan, const std::shared_ptr<comm::Communicator>& world);

}  // namespace ds::engine
