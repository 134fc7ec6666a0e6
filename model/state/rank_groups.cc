#include "model/state/rank_groups.h"

#include "comm/subgroups.h"

namespace ds::engine {
RankGroups make_rank_groups(const Plan& plan, const std::shared_ptr<comm::Communicator>& world) {
  RankGroups groups;
  const auto shard_ranks = static_cast<int>(plan.shard_ranks);
  groups.shards = world;
  if (shard_ranks < world->size()) {
    groups.shards = comm::own_group(*world, comm::consecutive_ranks(world->size(), shard_ranks), "shards");
    groups.replicas = comm::own_group(*world, comm::ranks_of_one_place(world->size(), shard_ranks), "replicas");
  }
  if (plan.gradient_bits > 0) {
    groups.quantized = std::make_shared<comm::QuantizedReducer>(
        comm::make_quantized_reducer(groups.shards, static_cast<int>(plan.gradient_node_ranks), plan.gradient_bits));
  }
  groups.compression = make_compression_groups(plan, groups.shards);
  if (!plan.gather) return groups;
  const int size = groups.shards->size();
  groups.parameters = comm::own_group(*groups.shards, comm::consecutive_ranks(size, size), "parameters");
  if (plan.node_ranks > 1) {
    const auto nodes = comm::consecutive_ranks(size, static_cast<int>(plan.node_ranks));
    groups.node = comm::own_group(*groups.parameters, nodes, "node");
  }
  return groups;
}

}  // namespace ds::engine
