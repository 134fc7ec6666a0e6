#include "config/plan/device_overhead.h"

#include <algorithm>

namespace ds::engine {
namespace {

// The groups of model/state/rank_groups and of the mesh. One of a single rank is no communicator of NCCL.
int64_t groups_of(const Plan& plan) {
  const Topology& topology = plan.topology;
  const int64_t copies = topology.dp / std::max<int64_t>(plan.shard_ranks, 1);
  int64_t groups = topology.world_size > 1;
  groups += (topology.pipe > 1) + (topology.tensor > 1);
  if (topology.pipe > 1 || topology.tensor > 1) groups += topology.dp > 1;
  if (topology.sequence > 1 && topology.batches() > 1) groups += 2;  // else one is all ranks, the other one rank
  if (copies > 1) groups += (plan.shard_ranks > 1) + 1;              // shards, replicas
  if (plan.gather) groups += (plan.shard_ranks > 1) + (plan.node_ranks > 1);
  return groups;
}

// With each neighbour one to it and one from it, in both directions of a pipeline.
int64_t pairs_of(const Plan& plan) { return 2 * std::min<int64_t>(plan.topology.pipe - 1, 2); }

}  // namespace

DeviceOverhead predict_device_overhead(const Plan& plan) {
  const int64_t groups = groups_of(plan);
  const int64_t pairs = pairs_of(plan);
  return {.context = kCudaContextBytes,
          .groups = groups,
          .pairs = pairs,
          .nccl = groups * kNcclGroupBytes + pairs * kNcclPairBytes,
          .workspaces = kMultiplyingThreads * kCublasWorkspaceBytes};
}

}  // namespace ds::engine
