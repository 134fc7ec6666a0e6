// Which messages the computing of a schedule makes and needs. Torch-free, internal to pipeline/.
#pragma once

#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

#include "pipeline/schedule/action.h"

namespace ds::pipeline {

// An activation or a gradient of one micro-batch, from a stage to a neighbour on another rank.
struct Message {
  bool gradient = false;
  int from = 0;  // stages
  int to = 0;
  int micro_batch = 0;

  Action send() const {
    return {gradient ? ActionKind::kSendGradient : ActionKind::kSendActivation, from, micro_batch};
  }
  Action recv() const { return {gradient ? ActionKind::kRecvGradient : ActionKind::kRecvActivation, to, micro_batch}; }
};

// Stages must be in [0, stages) and micro-batches in [0, micro_batches) wherever one is handed in. `rank_of` must
// outlive it.
class MessageRoutes {
 public:
  MessageRoutes(const std::vector<int>& rank_of, int micro_batches)
      : rank_of_(rank_of), micro_batches_(static_cast<size_t>(micro_batches)) {}

  int sender(const Message& message) const { return rank_of_[static_cast<size_t>(message.from)]; }
  int receiver(const Message& message) const { return rank_of_[static_cast<size_t>(message.to)]; }

  // The message that an action which computes makes, and the one it needs; none for W, at the ends of the model, and
  // between stages of one rank.
  std::optional<Message> made_by(const Action& compute) const;
  std::optional<Message> needed_by(const Action& compute) const;
  // The message that an action sends or receives; none when no message can go there.
  std::optional<Message> moved_by(const Action& transfer) const;

  // Messages numbered from 0, with gaps where none can go.
  size_t index(const Message& message) const {
    const size_t stage = static_cast<size_t>(message.to) + (message.gradient ? rank_of_.size() : 0);
    return stage * micro_batches_ + static_cast<size_t>(message.micro_batch);
  }
  size_t size() const { return 2 * rank_of_.size() * micro_batches_; }

 private:
  std::optional<Message> between(bool gradient, int from, int to, int micro_batch) const;

  const std::vector<int>& rank_of_;
  size_t micro_batches_;
};

// Pairs of ranks, the lower one first, that have neighbouring stages and so send one another messages. Ascending.
std::vector<std::pair<int, int>> neighbouring_ranks(const std::vector<int>& rank_of);

}  // namespace ds::pipeline
