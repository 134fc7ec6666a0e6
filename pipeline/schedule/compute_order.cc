#include "pipeline/schedule/compute_order.h"

#include <algorithm>
#include <array>
#include <deque>
#include <utility>
#include <vector>

namespace ds::pipeline {
namespace {

using enum ActionKind;

// `warm_up` forwards come before the first pair F, I; W follows `lag` micro-batches behind I.
ComputeOrder with_delayed_weights(const ScheduleShape& shape, int rank, int warm_up, int lag) {
  const int all = shape.micro_batches;
  warm_up = std::min(warm_up, all);
  ComputeOrder order;
  for (int i = 0; i < warm_up; ++i) order.push_back({kForward, rank, i});
  for (int i = 0; i < all; ++i) {
    if (warm_up + i < all) order.push_back({kForward, rank, warm_up + i});
    order.push_back({kBackwardInput, rank, i});
    if (i >= lag) order.push_back({kBackwardWeight, rank, i - lag});
  }
  for (int i = std::max(0, all - lag); i < all; ++i) order.push_back({kBackwardWeight, rank, i});
  return order;
}

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

// Appends actions of one rank, counting the micro-batches of each chunk and kind.
class VOrder {
 public:
  VOrder(const ScheduleShape& shape, int rank)
      : exist_(shape.micro_batches), stages_{rank, 2 * shape.ranks - 1 - rank} {}

  void forward(int chunk) { add(kForward, chunk, forwards_[chunk]++); }
  void backward(int chunk) { add(kBackward, chunk, backwards_[chunk]++); }
  // I now; its W waits in line.
  void backward_input(int chunk) {
    const int micro_batch = backwards_[chunk]++;
    add(kBackwardInput, chunk, micro_batch);
    waiting_[chunk].push_back(micro_batch);
    line_.push_back(chunk);
  }
  // The oldest waiting W of a chunk.
  void backward_weight(int chunk) {
    add(kBackwardWeight, chunk, waiting_[chunk].front());
    waiting_[chunk].pop_front();
  }
  // The oldest waiting W of either chunk; not to be mixed with the above.
  void oldest_backward_weight() {
    const int chunk = line_.front();
    line_.pop_front();
    backward_weight(chunk);
  }

  int forwards(int chunk) const { return forwards_[chunk]; }
  bool has_waiting(int chunk) const { return !waiting_[chunk].empty(); }
  ComputeOrder take() { return std::move(order_); }

 private:
  void add(ActionKind kind, int chunk, int micro_batch) {
    if (micro_batch < exist_) order_.push_back({kind, stages_[chunk], micro_batch});
  }

  int exist_;
  std::array<int, 2> stages_;
  std::array<int, 2> forwards_{};
  std::array<int, 2> backwards_{};
  std::array<std::deque<int>, 2> waiting_;  // micro-batches whose W is to come
  std::deque<int> line_;                    // chunks of those, oldest first
  ComputeOrder order_;
};

}  // namespace

// gpipe and 1f1b: one stage a rank, whole backwards.

ComputeOrder gpipe_order(const ScheduleShape& shape, int rank) {
  ComputeOrder order;
  for (int i = 0; i < shape.micro_batches; ++i) order.push_back({kForward, rank, i});
  for (int i = 0; i < shape.micro_batches; ++i) order.push_back({kBackward, rank, i});
  return order;
}

ComputeOrder one_f_one_b_order(const ScheduleShape& shape, int rank) {
  const int warm_up = std::min(shape.micro_batches, shape.ranks - 1 - rank);
  ComputeOrder order;
  for (int i = 0; i < warm_up; ++i) order.push_back({kForward, rank, i});
  for (int i = 0; i < shape.micro_batches; ++i) {
    if (warm_up + i < shape.micro_batches) order.push_back({kForward, rank, warm_up + i});
    order.push_back({kBackward, rank, i});
  }
  return order;
}

// Zero-bubble schedules with one stage a rank (Qi et al., arXiv:2401.10241, the two made by hand): backward is cut in
// I, which the rank before waits for, and W, which nobody waits for and which fills what would be idle time.

ComputeOrder zero_bubble_h1_order(const ScheduleShape& shape, int rank) {
  return with_delayed_weights(shape, rank, shape.ranks - 1 - rank, rank);
}

ComputeOrder zero_bubble_h2_order(const ScheduleShape& shape, int rank) {
  return with_delayed_weights(shape, rank, 2 * (shape.ranks - 1 - rank), 2 * rank);
}

// Several chunks a rank, dealt in turns: interleaved 1F1B and its forwards alone, inference.

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

// Schedules with two chunks in a V: rank r has stage r and stage 2p-1-r, so that the last rank's two stages are
// neighbours and the first rank has both ends. Both need about twice as many micro-batches as ranks to come into step;
// with fewer, those that do not exist are left out of the order that more of them would have.

ComputeOrder zero_bubble_v_order(const ScheduleShape& shape, int rank) {
  const int ranks = shape.ranks;
  const int all = std::max(shape.micro_batches, 2 * ranks - 1);
  VOrder order(shape, rank);
  for (int i = 0; i < 2 * (ranks - rank) - 1; ++i) order.forward(0);
  for (int i = 0; i < rank; ++i) {
    order.forward(1);
    order.forward(0);
  }
  const auto one_of_second_chunk = [&] {
    order.forward(1);
    order.backward_input(1);
    order.backward_weight(1);
  };
  for (int i = 0; i < ranks - rank; ++i) one_of_second_chunk();
  while (order.forwards(1) < all) {
    if (order.forwards(0) < all) order.forward(0);
    order.backward_input(0);
    order.backward_weight(0);
    one_of_second_chunk();
  }
  for (int i = 0; i < rank; ++i) {
    order.backward_input(0);
    order.backward_input(1);
  }
  for (int i = 0; i < ranks - rank; ++i) {
    order.backward_input(0);
    order.backward_weight(0);
  }
  while (order.has_waiting(1)) order.backward_weight(1);
  while (order.has_waiting(0)) order.backward_weight(0);
  return order.take();
}

// The eight parts of DeepSeek's DualPipeV. Where that runs a forward and a backward as one, to hide the communication
// of each behind the other's computation, they stand here one after the other.
ComputeOrder dual_pipe_v_order(const ScheduleShape& shape, int rank) {
  const int all = std::max(shape.micro_batches, 2 * shape.ranks);
  const int after = shape.ranks - 1 - rank;  // ranks after this one
  VOrder order(shape, rank);
  for (int i = 0; i < 2 * after; ++i) order.forward(0);
  for (int i = 0; i <= rank; ++i) {
    order.forward(0);
    order.forward(1);
  }
  for (int i = 0; i < after; ++i) {
    order.backward_input(1);
    order.oldest_backward_weight();
    order.forward(1);
  }
  for (int i = 0; i < all - 2 * shape.ranks + rank + 1; ++i) {
    order.forward(0);
    order.backward(1);
    order.forward(1);
    order.backward(0);
  }
  for (int i = 0; i < after; ++i) {
    order.backward(1);
    order.forward(1);
    order.backward(0);
  }
  // From the middle of this part on, backwards are cut in two: the first rank waits for I, and W fills the end.
  for (int i = 0; i < 2 * (rank + 1); ++i) {
    const int chunk = 1 - i % 2;
    if (i < rank + 1) {
      order.backward(chunk);
    } else {
      order.backward_input(chunk);
    }
  }
  for (int i = 0; i < after; ++i) {
    order.oldest_backward_weight();
    order.backward_input(0);
  }
  for (int i = 0; i <= rank; ++i) order.oldest_backward_weight();
  return order.take();
}

}  // namespace ds::pipeline
