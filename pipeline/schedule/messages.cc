// with_messages(): sends, receives and the end of a step, from the order of computing alone.
#include <algorithm>
#include <map>
#include <utility>

#include "core/check.h"
#include "pipeline/schedule/message_route.h"
#include "pipeline/schedule/schedule.h"

namespace ds::pipeline {
namespace {

class MessagePlan {
 public:
  MessagePlan(const ScheduleShape& shape, const std::vector<int>& rank_of,
              const std::vector<std::vector<Action>>& compute)
      : routes_(rank_of, shape.micro_batches), inbound_(compute.size()), place_(routes_.size(), kNotSent) {
    for (const std::vector<Action>& list : compute) {
      for (const Action& action : list) note_message(action);
    }
  }

  // One rank's list: each action of computing with its messages.
  std::vector<Action> list_of(const std::vector<Action>& compute) {
    std::vector<Action> list;
    list.reserve(3 * compute.size() + 3);
    for (size_t k = 0; k < compute.size(); ++k) {
      add_receives(compute[k], list);
      if (k + 1 < compute.size()) add_receives(compute[k + 1], list);
      list.push_back(compute[k]);
      if (const auto message = routes_.made_by(compute[k])) list.push_back(message->send());
    }
    return list;
  }

 private:
  static constexpr int kNotSent = -1;
  static constexpr int kStartedUnsent = -2;

  // Messages to a rank from one other, in the order in which they are sent.
  struct Channel {
    std::vector<Action> receives;
    int started = 0;
  };

  void note_message(const Action& action) {
    const auto message = routes_.made_by(action);
    if (!message) return;
    Channel& channel = channel_of(*message);
    place_[routes_.index(*message)] = static_cast<int>(channel.receives.size());
    channel.receives.push_back(message->recv());
  }

  Channel& channel_of(const Message& message) {
    return inbound_[static_cast<size_t>(routes_.receiver(message))][routes_.sender(message)];
  }

  // Starts what `action` needs, and everything that the same rank has sent before it.
  void add_receives(const Action& action, std::vector<Action>& list) {
    const auto message = routes_.needed_by(action);
    if (!message) return;
    int& place = place_[routes_.index(*message)];
    if (place == kStartedUnsent) return;
    if (place == kNotSent) {  // of a user's file that lacks actions: schedule_problems() names them
      list.push_back(message->recv());
      place = kStartedUnsent;
      return;
    }
    Channel& channel = channel_of(*message);
    while (channel.started <= place) list.push_back(channel.receives[static_cast<size_t>(channel.started++)]);
  }

  MessageRoutes routes_;
  std::vector<std::map<int, Channel>> inbound_;  // of each rank, by the sending one
  std::vector<int> place_;                       // of each message, in its channel
};

void require_numbers(const ScheduleShape& shape, const std::vector<int>& rank_of,
                     const std::vector<std::vector<Action>>& compute) {
  const auto ranks = static_cast<size_t>(shape.ranks);
  require<ConfigError>(compute.size() == ranks && rank_of.size() == ranks * static_cast<size_t>(shape.chunks),
                       "pipeline schedule: expected lists for ", shape.ranks, " ranks and ", shape.chunks,
                       " stages on each, found ", compute.size(), " lists and ", rank_of.size(), " stages");
  for (size_t rank = 0; rank < compute.size(); ++rank) {
    for (const Action& action : compute[rank]) {
      const bool known = is_compute(action.kind) && action.micro_batch >= 0 &&
                         action.micro_batch < shape.micro_batches && action.stage >= 0 &&
                         static_cast<size_t>(action.stage) < rank_of.size() &&
                         rank_of[static_cast<size_t>(action.stage)] == static_cast<int>(rank);
      require<ConfigError>(known, "pipeline schedule: rank ", rank, ": expected F, B, I or W of one of its own of ",
                           rank_of.size(), " stages and of a micro-batch in [0, ", shape.micro_batches, "), found ",
                           action);
    }
  }
}

}  // namespace

Schedule with_messages(std::string name, const ScheduleShape& shape, std::vector<int> rank_of,
                       const std::vector<std::vector<Action>>& compute) {
  require_numbers(shape, rank_of, compute);
  Schedule schedule;
  schedule.name = std::move(name);
  schedule.shape = shape;
  schedule.rank_of = std::move(rank_of);
  schedule.training = std::any_of(compute.begin(), compute.end(), [](const std::vector<Action>& list) {
    return std::any_of(list.begin(), list.end(), [](const Action& a) { return a.kind != ActionKind::kForward; });
  });
  MessagePlan messages(shape, schedule.rank_of, compute);
  for (const std::vector<Action>& order : compute) {
    std::vector<Action> list = messages.list_of(order);
    if (schedule.training) {
      for (const ActionKind kind : {ActionKind::kReduce, ActionKind::kReduceTied, ActionKind::kStep}) {
        list.push_back({.kind = kind});
      }
    }
    schedule.actions.push_back(std::move(list));
  }
  return schedule;
}

}  // namespace ds::pipeline
