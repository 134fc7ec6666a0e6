// Zero-bubble schedules with one stage a rank (Qi et al., arXiv:2401.10241, the two made by hand): backward is cut in
// I, which the rank before waits for, and W, which nobody waits for and which fills what would be idle time.
#include <algorithm>

#include "pipeline/schedule/compute_order.h"

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

}  // namespace

ComputeOrder zero_bubble_h1_order(const ScheduleShape& shape, int rank) {
  return with_delayed_weights(shape, rank, shape.ranks - 1 - rank, rank);
}

ComputeOrder zero_bubble_h2_order(const ScheduleShape& shape, int rank) {
  return with_delayed_weights(shape, rank, 2 * (shape.ranks - 1 - rank), 2 * rank);
}

}  // namespace ds::pipeline
