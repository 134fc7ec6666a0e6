#include "pipeline/schedule/schedule_check.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <optional>

#include "core/check.h"
#include "pipeline/schedule/message_route.h"
#include "pipeline/schedule/schedule_walk.h"

namespace ds::pipeline {
namespace {

using enum ActionKind;

constexpr size_t kMostProblems = 100;
constexpr std::array<ActionKind, 3> kEnd = {kReduce, kReduceTied, kStep};

class Problems {
 public:
  template <class... Parts>
  void add(const Parts&... parts) {
    if (texts_.size() < kMostProblems) {
      texts_.push_back(cat(parts...));
    } else {
      ++more_;
    }
  }
  bool empty() const { return texts_.empty(); }
  std::vector<std::string> take() {
    if (more_ > 0) texts_.push_back(cat("and ", more_, " more"));
    return std::move(texts_);
  }

 private:
  std::vector<std::string> texts_;
  size_t more_ = 0;
};

// Where each action that has a stage and a micro-batch stands in its rank's list.
class Places {
 public:
  static constexpr int kNone = -1;

  Places(size_t stages, int micro_batches)
      : stages_(stages),
        micro_batches_(static_cast<size_t>(micro_batches)),
        places_(kKinds * stages_ * micro_batches_, kNone) {}

  int& of(const Action& action) { return places_[index(action)]; }
  int of(const Action& action) const { return places_[index(action)]; }
  bool has(const Action& action) const { return of(action) != kNone; }

 private:
  static constexpr size_t kKinds = 8;  // kForward to kRecvGradient

  size_t index(const Action& action) const {
    return (static_cast<size_t>(action.kind) * stages_ + static_cast<size_t>(action.stage)) * micro_batches_ +
           static_cast<size_t>(action.micro_batch);
  }

  size_t stages_;
  size_t micro_batches_;
  std::vector<int> places_;
};

class Checker {
 public:
  explicit Checker(const Schedule& schedule)
      : schedule_(schedule),
        routes_(schedule.rank_of, schedule.shape.micro_batches),
        places_(schedule.rank_of.size(), schedule.shape.micro_batches) {}

  std::vector<std::string> run() {
    for (int rank = 0; rank < schedule_.shape.ranks; ++rank) note_places(rank);
    for (int stage = 0; stage < schedule_.stages(); ++stage) {
      for (int i = 0; i < schedule_.shape.micro_batches; ++i) {
        check_presence(stage, i);
        for (const ActionKind kind : {kForward, kBackward, kBackwardInput, kBackwardWeight}) {
          const Action action = {kind, stage, i};
          if (places_.has(action)) check_compute(action);
        }
        for (const ActionKind kind : {kSendActivation, kRecvActivation, kSendGradient, kRecvGradient}) {
          const Action action = {kind, stage, i};
          if (places_.has(action)) check_transfer(action);
        }
      }
    }
    for (int rank = 0; rank < schedule_.shape.ranks; ++rank) check_end(rank);
    check_message_order();
    // A walk needs every message to be there, and says nothing new when one is not.
    if (problems_.empty()) check_progress();
    return problems_.take();
  }

 private:
  int rank_of(const Action& action) const { return schedule_.rank_of[action.stage]; }
  bool both_on_one_rank(int stage, int other) const {
    return other >= 0 && other < schedule_.stages() && schedule_.rank_of[stage] == schedule_.rank_of[other];
  }

  // "rank 1, position 5, 1F0"
  std::string at(int rank, size_t position, const Action& action) const {
    return cat("rank ", rank, ", position ", position, ", ", to_text(action));
  }
  std::string at(const Action& action) const { return at(rank_of(action), places_.of(action), action); }
  // "1RF0 (position 4)", "1RF0, which is missing"
  std::string named(const Action& action) const {
    if (!places_.has(action)) return cat(to_text(action), ", which is missing");
    return cat(to_text(action), " (position ", places_.of(action), ")");
  }

  void note_places(int rank) {
    const std::vector<Action>& list = schedule_.actions[rank];
    for (size_t position = 0; position < list.size(); ++position) {
      const Action& action = list[position];
      if (action.kind >= kReduce) continue;
      if (action.stage < 0 || action.stage >= schedule_.stages() || action.micro_batch < 0 ||
          action.micro_batch >= schedule_.shape.micro_batches) {
        problems_.add(at(rank, position, action), ": expected a stage in [0, ", schedule_.stages(),
                      ") and a micro-batch in [0, ", schedule_.shape.micro_batches, ")");
      } else if (rank_of(action) != rank) {
        problems_.add(at(rank, position, action), ": stage ", action.stage, " is on rank ", rank_of(action));
      } else if (places_.has(action)) {
        problems_.add(at(rank, position, action), ": is there a second time, first at position ", places_.of(action));
      } else {
        places_.of(action) = static_cast<int>(position);
      }
    }
  }

  void check_presence(int stage, int i) {
    const Action forward = {kForward, stage, i};
    const Action backward = {kBackward, stage, i};
    const Action input = {kBackwardInput, stage, i};
    const Action weight = {kBackwardWeight, stage, i};
    if (!places_.has(forward)) missing(forward, "");
    if (!schedule_.training) {
      for (const Action& action : {backward, input, weight}) {
        if (places_.has(action)) problems_.add(at(action), ": this schedule has forwards only");
      }
      return;
    }
    if (places_.has(backward)) {
      for (const Action& part : {input, weight}) {
        if (places_.has(part)) problems_.add(at(part), ": is a part of ", named(backward));
      }
      return;
    }
    if (!places_.has(input) && !places_.has(weight)) {
      missing(backward, cat(", or ", to_text(input), " and ", to_text(weight)));
      return;
    }
    if (!places_.has(input)) missing(input, cat(", which ", to_text(weight), " follows"));
    if (!places_.has(weight)) missing(weight, cat(", which completes ", to_text(input)));
  }

  void missing(const Action& action, const std::string& more) {
    problems_.add("rank ", rank_of(action), ", ", to_text(action), more, ": missing from all ",
                  schedule_.actions[rank_of(action)].size(), " positions");
  }

  // Requires that everything an action needs from its own rank comes before it.
  void check_compute(const Action& action) {
    const auto [kind, stage, i] = action;
    if (kind == kForward) {
      if (both_on_one_rank(stage, stage - 1)) require_before(action, {kForward, stage - 1, i});
    } else if (kind == kBackwardWeight) {
      require_before(action, {kBackwardInput, stage, i});
    } else {
      require_before(action, {kForward, stage, i});
      if (both_on_one_rank(stage, stage + 1)) {
        const Action whole = {kBackward, stage + 1, i};
        require_before(action, places_.has(whole) ? whole : Action{kBackwardInput, stage + 1, i});
      }
    }
    if (const auto message = routes_.needed_by(action)) {
      if (!places_.has(message->recv())) {
        problems_.add(at(action), ": needs ", named(message->recv()));
      } else {
        require_before(action, message->recv());
      }
    }
    if (const auto message = routes_.made_by(action)) {
      if (!places_.has(message->send())) problems_.add(at(action), ": is sent by ", named(message->send()));
    }
  }

  void check_transfer(const Action& action) {
    const auto message = routes_.moved_by(action);
    if (!message) {
      problems_.add(at(action), ": no message goes there, no stage of another rank is at the other end");
      return;
    }
    if (is_recv(action.kind)) {
      if (!places_.has(message->send())) {
        problems_.add(at(action), ": receives what rank ", routes_.sender(*message), " sends with ",
                      named(message->send()));
      }
      return;
    }
    const Action whole = {message->gradient ? kBackward : kForward, action.stage, action.micro_batch};
    const bool in_parts = message->gradient && !places_.has(whole);
    require_before(action, in_parts ? Action{kBackwardInput, action.stage, action.micro_batch} : whole);
    if (!places_.has(message->recv())) {
      problems_.add(at(action), ": rank ", routes_.receiver(*message), " receives it with ", named(message->recv()));
    }
  }

  // Both on one rank. That `earlier` exists at all is somebody else's to say.
  void require_before(const Action& action, const Action& earlier) {
    if (places_.has(earlier) && places_.of(earlier) > places_.of(action)) {
      problems_.add(at(action), ": comes before ", named(earlier), ", which it needs");
    }
  }

  void check_end(int rank) {
    const std::vector<Action>& list = schedule_.actions[rank];
    const size_t end = schedule_.training ? kEnd.size() : 0;
    for (size_t position = 0; position < list.size(); ++position) {
      const Action& action = list[position];
      if (action.kind < kReduce) continue;
      if (!schedule_.training) {
        problems_.add(at(rank, position, action), ": this schedule has forwards only");
      } else if (position + end < list.size() || action.kind != kEnd[position + end - list.size()]) {
        problems_.add(at(rank, position, action), ": expected REDUCE, REDUCE_TIED and STEP once, at the end");
      }
    }
    for (size_t k = 0; k < end; ++k) {
      const bool there =
          std::any_of(list.begin(), list.end(), [&](const Action& action) { return action.kind == kEnd[k]; });
      if (!there) {
        problems_.add("rank ", rank, ", position ", list.size(), ", ", to_text({.kind = kEnd[k]}),
                      ": missing, expected REDUCE, REDUCE_TIED and STEP at the end");
      }
    }
  }

  // Between two ranks, messages are received in the order of their sends.
  void check_message_order() {
    for (int rank = 0; rank < schedule_.shape.ranks; ++rank) {
      std::map<int, Message> latest;  // of those received, the one sent last; by the rank that sends
      for (const Action& action : schedule_.actions[rank]) {
        const auto message = received_message(rank, action);
        if (!message) continue;
        const int sender = routes_.sender(*message);
        const auto [found, first] = latest.try_emplace(sender, *message);
        if (first) continue;
        const Message& before = found->second;
        if (places_.of(message->send()) < places_.of(before.send())) {
          problems_.add(at(action), ": comes after ", named(before.recv()), ", but rank ", sender, " sends ",
                        named(message->send()), " before ", named(before.send()));
        } else {
          found->second = *message;
        }
      }
    }
  }

  // Returns the message that an action receives, if it is sent somewhere.
  std::optional<Message> received_message(int rank, const Action& action) const {
    if (!is_recv(action.kind) || action.stage < 0 || action.stage >= schedule_.stages() || action.micro_batch < 0 ||
        action.micro_batch >= schedule_.shape.micro_batches || rank_of(action) != rank) {
      return std::nullopt;
    }
    const auto message = routes_.moved_by(action);
    return message && places_.has(message->send()) ? message : std::nullopt;
  }

  void check_progress() {
    const std::vector<size_t> stopped = walk(schedule_, routes_, [](int, const Action&) {});
    for (int rank = 0; rank < schedule_.shape.ranks; ++rank) {
      if (stopped[rank] == schedule_.actions[rank].size()) continue;
      problems_.add(circle(stopped, rank));
      return;
    }
  }

  // A rank that stopped waits for another one that did; following them leads into the circle.
  std::string circle(const std::vector<size_t>& stopped, int rank) const {
    const auto awaited = [&](int waiting) { return *routes_.needed_by(schedule_.actions[waiting][stopped[waiting]]); };
    std::vector<bool> seen(stopped.size());
    while (!seen[rank]) {
      seen[rank] = true;
      rank = routes_.sender(awaited(rank));
    }
    const int first = rank;
    std::string text = "ranks wait for one another in a circle: ";
    do {
      const Message message = awaited(rank);
      text += cat(rank == first ? "" : ", which ", rank == first ? cat("rank ", rank, " ") : "", "waits at position ",
                  stopped[rank], " in ", to_text(schedule_.actions[rank][stopped[rank]]), " for ",
                  to_text(message.recv()), " sent by rank ", routes_.sender(message));
      rank = routes_.sender(message);
    } while (rank != first);
    return text;
  }

  const Schedule& schedule_;
  MessageRoutes routes_;
  Places places_;
  Problems problems_;
};

// Returns the problems of the numbers by which all else is counted.
std::vector<std::string> shape_problems(const Schedule& schedule) {
  const ScheduleShape& shape = schedule.shape;
  if (shape.ranks < 1 || shape.chunks < 1 || shape.micro_batches < 1) {
    return {cat("expected at least 1 rank, chunk and micro-batch, found ", shape.ranks, ", ", shape.chunks, " and ",
                shape.micro_batches)};
  }
  if (schedule.actions.size() != static_cast<size_t>(shape.ranks)) {
    return {cat("expected a list of actions for each of ", shape.ranks, " ranks, found ", schedule.actions.size())};
  }
  if (schedule.rank_of.size() != static_cast<size_t>(schedule.stages())) {
    return {cat("expected a rank for each of ", schedule.stages(), " stages, found ", schedule.rank_of.size())};
  }
  std::vector<std::string> problems;
  for (int stage = 0; stage < schedule.stages(); ++stage) {
    const int rank = schedule.rank_of[stage];
    if (rank < 0 || rank >= shape.ranks) {
      problems.push_back(cat("stage ", stage, ": expected a rank in [0, ", shape.ranks, "), found ", rank));
    }
  }
  return problems;
}

}  // namespace

std::vector<std::string> schedule_problems(const Schedule& schedule) {
  std::vector<std::string> problems = shape_problems(schedule);
  return problems.empty() ? Checker(schedule).run() : problems;
}

void require_sound(const Schedule& schedule) {
  const std::vector<std::string> problems = schedule_problems(schedule);
  if (problems.empty()) return;
  std::string text = cat("pipeline schedule ", schedule.name, ": ", problems.size() > 1 ? "mistakes:" : "a mistake:");
  for (const std::string& problem : problems) text += cat("\n  ", problem);
  throw ConfigError(text);
}

}  // namespace ds::pipeline
