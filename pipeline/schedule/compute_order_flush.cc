// gpipe and 1f1b: one stage a rank, whole backwards.
#include <algorithm>

#include "pipeline/schedule/compute_order.h"

namespace ds::pipeline {
namespace {

using enum ActionKind;

}  // namespace

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

}  // namespace ds::pipeline
