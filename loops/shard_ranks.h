// The ranks that a sharded module talks with.
#pragma once

#include <c10/core/Device.h>

#include <memory>

#include "dsengine/comm.h"
#include "dsengine/fully_shard.h"
#include "model/state/ranks.h"

namespace ds::loops {

struct ShardRanks {
  std::shared_ptr<comm::Communicator> all;       // data-parallel ranks: each has batches of its own
  std::shared_ptr<comm::Communicator> shards;    // each has a slice
  std::shared_ptr<comm::Communicator> replicas;  // those with the same slice; null: there is one copy
  std::shared_ptr<comm::Communicator> tensor;    // those with parts of the same parameters; null: they are whole
  std::shared_ptr<comm::Communicator> world;     // `all` of every rank of `tensor`
  c10::Device device = c10::kCPU;
};

// From the mesh, the group or the job, as the options say. `device`: where the parameters are. `tensor`: the ranks that
// they are split over, null: they are whole. Throws ConfigError for options that exclude each other, and for a mesh
// that does not have the ranks of `tensor` along its innermost axis. Collective.
ShardRanks shard_ranks(const FullyShardOptions& options, c10::Device device, const comm::Communicator* tensor);

// HYBRID_SHARD without a mesh: shards inside of hosts with so many consecutive ranks each, copies over the hosts.
// Throws ConfigError where hosts are not like that. Collective.
void shard_inside_hosts(ShardRanks& ranks, int ranks_per_host);

// As the engine's parts take them, with a group for gathers alone. Collective.
engine::Ranks engine_ranks(const ShardRanks& ranks);

}  // namespace ds::loops
