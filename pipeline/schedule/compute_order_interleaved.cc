// Several chunks a rank, dealt in turns: interleaved 1F1B and its forwards alone, inference.
#include <algorithm>
#include <vector>

#include "pipeline/schedule/compute_order.h"

namespace ds::pipeline {
namespace {

using enum ActionKind;

// Micro-batches pass in groups, each through all chunks before the next group: so many in each group. A group of at
// least as many as there are ranks keeps all ranks busy, therefore what is left over makes groups larger, the first
// ones first; a last smaller group, after which ranks wait, is what Megatron-LM avoids by asking for a multiple.
std::vector<int> group_sizes(const ScheduleShape& shape) {
  const int groups = std::max(1, shape.micro_batches / shape.ranks);
  std::vector<int> sizes;
  for (int i = 0; i < groups; ++i) {
    sizes.push_back(shape.micro_batches / groups + (i < shape.micro_batches % groups ? 1 : 0));
  }
  return sizes;
}

// The stages of a rank to which chunks are dealt in turns.
std::vector<int> stages_in_turns(const ScheduleShape& shape, int rank) {
  std::vector<int> stages;
  for (int chunk = 0; chunk < shape.chunks; ++chunk) stages.push_back(chunk * shape.ranks + rank);
  return stages;
}

// Each group of micro-batches through all `stages` of a rank, in their order, or in reverse for backwards.
ComputeOrder in_groups(const ScheduleShape& shape, std::vector<int> stages, ActionKind kind) {
  if (kind != kForward) std::reverse(stages.begin(), stages.end());
  ComputeOrder order;
  int first = 0;
  for (const int size : group_sizes(shape)) {
    for (const int stage : stages) {
      for (int i = first; i < first + size; ++i) order.push_back({kind, stage, i});
    }
    first += size;
  }
  return order;
}

}  // namespace

ComputeOrder interleaved_order(const ScheduleShape& shape, int rank) {
  if (shape.chunks == 1) return one_f_one_b_order(shape, rank);
  const ComputeOrder forwards = in_groups(shape, stages_in_turns(shape, rank), kForward);
  const ComputeOrder backwards = in_groups(shape, stages_in_turns(shape, rank), kBackward);
  const int group = group_sizes(shape).front();
  const size_t warm_up = std::min<size_t>(forwards.size(), (shape.ranks - rank - 1) * 2 + (shape.chunks - 1) * group);
  ComputeOrder order(forwards.begin(), forwards.begin() + static_cast<std::ptrdiff_t>(warm_up));
  for (size_t i = 0; i < backwards.size(); ++i) {
    if (warm_up + i < forwards.size()) order.push_back(forwards[warm_up + i]);
    order.push_back(backwards[i]);
  }
  return order;
}

ComputeOrder inference_order(const ScheduleShape& shape, const std::vector<int>& stages) {
  return in_groups(shape, stages, kForward);
}

}  // namespace ds::pipeline
