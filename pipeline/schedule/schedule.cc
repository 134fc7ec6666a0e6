#include "pipeline/schedule/schedule.h"

#include <utility>

#include "core/check.h"
#include "pipeline/schedule/compute_order.h"

namespace ds::pipeline {
namespace {

constexpr int kMostForwards = 1 << 27;  // of all stages; far beyond any job, and a list of them still fits in memory

void require_shape(ScheduleKind kind, const ScheduleShape& shape) {
  const std::pair<const char*, int> sizes[] = {
      {"ranks", shape.ranks}, {"chunks", shape.chunks}, {"micro-batches", shape.micro_batches}};
  for (const auto& [what, number] : sizes) {
    require<ConfigError>(number >= 1, "pipeline schedule ", name_of(kind), ": expected at least 1 of its ", what,
                         ", found ", number);
  }
  const double actions = static_cast<double>(shape.ranks) * shape.chunks * shape.micro_batches;
  require<ConfigError>(actions <= kMostForwards, "pipeline schedule ", name_of(kind), ": expected at most ",
                       kMostForwards, " forwards, found ", shape.ranks, " ranks x ", shape.chunks, " chunks x ",
                       shape.micro_batches, " micro-batches");
  switch (kind) {
    case ScheduleKind::kGPipe:
    case ScheduleKind::k1F1B:
    case ScheduleKind::kZbH1:
    case ScheduleKind::kZbH2:
      require<ConfigError>(shape.chunks == 1, "pipeline schedule ", name_of(kind), ": expected 1 chunk a rank, found ",
                           shape.chunks,
                           "; use interleaved for any number of chunks, zbv or dualpipev for 2, or set chunks to 1");
      break;
    case ScheduleKind::kZbV:
    case ScheduleKind::kDualPipeV:
      require<ConfigError>(shape.chunks == 2, "pipeline schedule ", name_of(kind), ": expected 2 chunks a rank, found ",
                           shape.chunks,
                           "; set chunks to 2, or use zb_h1 or 1f1b for 1 and interleaved for any number");
      break;
    case ScheduleKind::kInterleaved:
    case ScheduleKind::kInference:
      break;
  }
}

ComputeOrder compute_order(ScheduleKind kind, const ScheduleShape& shape, int rank) {
  switch (kind) {
    case ScheduleKind::kGPipe:
      return gpipe_order(shape, rank);
    case ScheduleKind::k1F1B:
      return one_f_one_b_order(shape, rank);
    case ScheduleKind::kInterleaved:
      return interleaved_order(shape, rank);
    case ScheduleKind::kZbH1:
      return zero_bubble_h1_order(shape, rank);
    case ScheduleKind::kZbH2:
      return zero_bubble_h2_order(shape, rank);
    case ScheduleKind::kZbV:
      return zero_bubble_v_order(shape, rank);
    case ScheduleKind::kDualPipeV:
      return dual_pipe_v_order(shape, rank);
    case ScheduleKind::kInference:
      break;  // make_inference_schedule()
  }
  throw InternalError("pipeline schedule: a kind without an order");
}

}  // namespace

std::vector<int> Schedule::stages_of(int rank) const {
  std::vector<int> own;
  for (int stage = 0; stage < static_cast<int>(rank_of.size()); ++stage) {
    if (rank_of[stage] == rank) own.push_back(stage);
  }
  return own;
}

std::vector<int> place_stages(ScheduleKind kind, const ScheduleShape& shape) {
  require_shape(kind, shape);
  const bool v_shape = kind == ScheduleKind::kZbV || kind == ScheduleKind::kDualPipeV;
  std::vector<int> rank_of;
  for (int chunk = 0; chunk < shape.chunks; ++chunk) {
    for (int i = 0; i < shape.ranks; ++i) {
      rank_of.push_back(v_shape && chunk % 2 == 1 ? shape.ranks - 1 - i : i);
    }
  }
  return rank_of;
}

Schedule make_schedule(ScheduleKind kind, const ScheduleShape& shape) {
  std::vector<int> rank_of = place_stages(kind, shape);
  if (kind == ScheduleKind::kInference) return make_inference_schedule(shape, std::move(rank_of));
  std::vector<std::vector<Action>> compute;
  for (int rank = 0; rank < shape.ranks; ++rank) compute.push_back(compute_order(kind, shape, rank));
  return with_messages(name_of(kind), shape, std::move(rank_of), compute);
}

Schedule make_inference_schedule(const ScheduleShape& shape, std::vector<int> rank_of) {
  std::vector<std::vector<int>> stages(static_cast<size_t>(shape.ranks));
  for (size_t stage = 0; stage < rank_of.size(); ++stage) {
    stages[static_cast<size_t>(rank_of[stage])].push_back(static_cast<int>(stage));
  }
  std::vector<std::vector<Action>> compute;
  for (const std::vector<int>& own : stages) compute.push_back(inference_order(shape, own));
  return with_messages(name_of(ScheduleKind::kInference), shape, std::move(rank_of), compute);
}

}  // namespace ds::pipeline
