#include "pipeline/schedule/message_route.h"

#include <algorithm>
#include <set>

namespace ds::pipeline {
namespace {

using enum ActionKind;

}  // namespace

std::optional<Message> MessageRoutes::made_by(const Action& compute) const {
  if (compute.kind == kForward) return between(false, compute.stage, compute.stage + 1, compute.micro_batch);
  if (compute.kind == kBackwardWeight) return std::nullopt;
  return between(true, compute.stage, compute.stage - 1, compute.micro_batch);
}

std::optional<Message> MessageRoutes::needed_by(const Action& compute) const {
  if (compute.kind == kForward) return between(false, compute.stage - 1, compute.stage, compute.micro_batch);
  if (compute.kind == kBackwardWeight) return std::nullopt;
  return between(true, compute.stage + 1, compute.stage, compute.micro_batch);
}

std::optional<Message> MessageRoutes::moved_by(const Action& transfer) const {
  const int stage = transfer.stage;
  switch (transfer.kind) {
    case kSendActivation:
      return between(false, stage, stage + 1, transfer.micro_batch);
    case kRecvActivation:
      return between(false, stage - 1, stage, transfer.micro_batch);
    case kSendGradient:
      return between(true, stage, stage - 1, transfer.micro_batch);
    case kRecvGradient:
      return between(true, stage + 1, stage, transfer.micro_batch);
    default:
      return std::nullopt;
  }
}

std::optional<Message> MessageRoutes::between(bool gradient, int from, int to, int micro_batch) const {
  const auto exists = [&](int stage) { return stage >= 0 && static_cast<size_t>(stage) < rank_of_.size(); };
  if (!exists(from) || !exists(to)) return std::nullopt;
  if (rank_of_[static_cast<size_t>(from)] == rank_of_[static_cast<size_t>(to)]) return std::nullopt;
  return Message{gradient, from, to, micro_batch};
}

std::vector<std::pair<int, int>> neighbouring_ranks(const std::vector<int>& rank_of) {
  std::set<std::pair<int, int>> pairs;
  for (size_t stage = 1; stage < rank_of.size(); ++stage) {
    const auto pair = std::minmax(rank_of[stage - 1], rank_of[stage]);
    if (pair.first != pair.second) pairs.insert(pair);
  }
  return {pairs.begin(), pairs.end()};
}

}  // namespace ds::pipeline
