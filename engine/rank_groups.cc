#include "engine/rank_groups.h"

#include <string>
#include <vector>

namespace ds::engine {
namespace {

// first, first + step, ...: `count` of them.
std::vector<int> every(int step, int first, int count) {
  std::vector<int> ranks;
  for (int i = 0; i < count; ++i) ranks.push_back(first + i * step);
  return ranks;
}

// Splits a group into runs of `length` consecutive ranks; returns this rank's.
std::shared_ptr<comm::Communicator> consecutive(comm::Communicator& group, int length, const std::string& name) {
  std::shared_ptr<comm::Communicator> own;
  for (int first = 0; first < group.size(); first += length) {
    const auto part = group.new_group(every(1, first, length), name);
    if (part) own = part;
  }
  return own;
}

// Splits a group into the ranks that have the same place in runs of `length`.
std::shared_ptr<comm::Communicator> across(comm::Communicator& group, int length, const std::string& name) {
  std::shared_ptr<comm::Communicator> own;
  for (int first = 0; first < length; ++first) {
    const auto part = group.new_group(every(length, first, group.size() / length), name);
    if (part) own = part;
  }
  return own;
}

}  // namespace

RankGroups make_rank_groups(const Plan& plan, const std::shared_ptr<comm::Communicator>& world) {
  RankGroups groups;
  const auto shard_ranks = static_cast<int>(plan.shard_ranks);
  groups.shards = world;
  if (shard_ranks < world->size()) {
    groups.shards = consecutive(*world, shard_ranks, "shards");
    groups.replicas = across(*world, shard_ranks, "replicas");
  }
  if (plan.gradient_bits > 0) {
    groups.quantized = std::make_shared<comm::QuantizedReducer>(
        comm::make_quantized_reducer(groups.shards, static_cast<int>(plan.gradient_node_ranks), plan.gradient_bits));
  }
  if (!plan.gather) return groups;
  groups.parameters = consecutive(*groups.shards, groups.shards->size(), "parameters");
  if (plan.node_ranks > 1) groups.node = consecutive(*groups.parameters, static_cast<int>(plan.node_ranks), "node");
  return groups;
}

}  // namespace ds::engine
