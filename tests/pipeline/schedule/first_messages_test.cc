// On transports where the first message of two ranks makes both of them meet (NCCL), schedules stand still in their
// first batch; ranks that go through their pairs first do not.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "core/text.h"
#include "pipeline/schedule/message_route.h"
#include "pipeline/schedule/schedule.h"

namespace ds::pipeline {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Pair;

// Two ranks and the direction of messages, which have a communicator of their own.
struct Line {
  Line(int sender, int receiver)
      : low(std::min(sender, receiver)), high(std::max(sender, receiver)), up(sender < receiver) {}
  int low, high;
  bool up;
  auto operator<=>(const Line&) const = default;
};

// Lines that both ranks have come to.
class Lines {
 public:
  // False: `rank` waits there for the other one.
  bool pass(const Line& line, int rank) {
    std::set<int>& ranks = come_[line];
    ranks.insert(rank);
    return ranks.size() == 2;
  }

 private:
  std::map<Line, std::set<int>> come_;
};

// Steps ranks while any of them can go on; whether all come to their end. step(rank): false where it cannot, or is
// done.
template <class Step, class Done>
bool all_end(int ranks, const Step& step, const Done& done) {
  for (bool moves = true; moves;) {
    moves = false;
    for (int rank = 0; rank < ranks; ++rank) {
      while (step(rank)) moves = true;
    }
  }
  for (int rank = 0; rank < ranks; ++rank) {
    if (!done(rank)) return false;
  }
  return true;
}

// As open_pairs() does it.
bool open_all(const std::vector<int>& rank_of, int ranks, Lines& lines) {
  std::vector<std::vector<Line>> todo(static_cast<size_t>(ranks));
  for (const auto& [low, high] : neighbouring_ranks(rank_of)) {
    for (const int rank : {low, high}) {
      todo[static_cast<size_t>(rank)].emplace_back(low, high);
      todo[static_cast<size_t>(rank)].emplace_back(high, low);
    }
  }
  std::vector<size_t> place(static_cast<size_t>(ranks), 0);
  const auto done = [&](int rank) {
    return place[static_cast<size_t>(rank)] == todo[static_cast<size_t>(rank)].size();
  };
  const auto step = [&](int rank) {
    const auto r = static_cast<size_t>(rank);
    if (done(rank) || !lines.pass(todo[r][place[r]], rank)) return false;
    ++place[r];
    return true;
  };
  return all_end(ranks, step, done);
}

// The first batch, with receives that begin as those of StageMessages: once their shapes are known, and after all that
// the same rank has sent before.
class FirstBatch {
 public:
  FirstBatch(const Schedule& schedule, Lines& lines)
      : schedule_(schedule),
        lines_(lines),
        routes_(schedule.rank_of, schedule.shape.micro_batches),
        place_(schedule.actions.size(), 0) {}

  bool runs_through() {
    return all_end(
        schedule_.shape.ranks, [this](int rank) { return step(rank); }, [this](int rank) { return done(rank); });
  }

 private:
  bool done(int rank) const {
    return place_[static_cast<size_t>(rank)] == schedule_.actions[static_cast<size_t>(rank)].size();
  }

  bool step(int rank) {
    const auto r = static_cast<size_t>(rank);
    if (done(rank) || !may_go_on(rank, schedule_.actions[r][place_[r]])) return false;
    ++place_[r];
    return true;
  }

  bool may_go_on(int rank, const Action& action) {
    if (is_compute(action.kind)) {
      const auto message = routes_.needed_by(action);
      return !message || uses(*message, rank);
    }
    const auto message = routes_.moved_by(action);
    if (!message) return true;
    if (message->recv() == action) return begins(*message, rank);
    if (!passes(*message, rank)) return false;
    sent_.insert(routes_.index(*message));
    return true;
  }

  bool passes(const Message& message, int rank) {
    return lines_.pass({routes_.sender(message), routes_.receiver(message)}, rank);
  }

  bool begins(const Message& message, int rank) {
    std::vector<size_t>& waiting = waiting_[{rank, routes_.sender(message)}];
    const Message activation = {false, message.to, message.from, message.micro_batch};
    const bool known =
        message.gradient ? sent_.contains(routes_.index(activation)) : known_stages_.contains(message.from);
    if (known && waiting.empty()) return passes(message, rank);
    waiting.push_back(routes_.index(message));
    return true;
  }

  bool uses(const Message& message, int rank) {
    if (!passes(message, rank) || !sent_.contains(routes_.index(message))) return false;
    std::vector<size_t>& waiting = waiting_[{rank, routes_.sender(message)}];
    const auto found = std::find(waiting.begin(), waiting.end(), routes_.index(message));
    if (found != waiting.end()) waiting.erase(waiting.begin(), found + 1);
    if (!message.gradient) known_stages_.insert(message.from);
    return true;
  }

  const Schedule& schedule_;
  Lines& lines_;
  MessageRoutes routes_;
  std::vector<size_t> place_;                                   // of each rank, in its list
  std::set<size_t> sent_;                                       // messages
  std::set<int> known_stages_;                                  // whose outputs have shapes that the receiver knows
  std::map<std::pair<int, int>, std::vector<size_t>> waiting_;  // messages to a rank from another: begun, not started
};

TEST(FirstMessages, PairsAreThoseOfNeighbouringStages) {
  EXPECT_THAT(neighbouring_ranks({0, 1, 2, 3}), ElementsAre(Pair(0, 1), Pair(1, 2), Pair(2, 3)));
  EXPECT_THAT(neighbouring_ranks({0, 1, 2, 0, 1, 2}), ElementsAre(Pair(0, 1), Pair(0, 2), Pair(1, 2)));
  EXPECT_THAT(neighbouring_ranks({0, 1, 2, 2, 1, 0}), ElementsAre(Pair(0, 1), Pair(1, 2)));
  EXPECT_THAT(neighbouring_ranks({0, 0}), IsEmpty());
}

TEST(FirstMessages, StandStillInABatch) {
  using enum ScheduleKind;
  const std::vector<std::pair<ScheduleKind, ScheduleShape>> stuck = {
      {kGPipe, {.ranks = 2, .micro_batches = 2}}, {kGPipe, {.ranks = 4, .micro_batches = 8}},
      {k1F1B, {.ranks = 4, .micro_batches = 3}},  {kInterleaved, {.ranks = 3, .chunks = 2, .micro_batches = 2}},
      {kZbH1, {.ranks = 4, .micro_batches = 3}},  {kZbH2, {.ranks = 4, .micro_batches = 5}}};
  for (const auto& [kind, shape] : stuck) {
    const Schedule schedule = make_schedule(kind, shape);
    Lines lines;
    EXPECT_FALSE(FirstBatch(schedule, lines).runs_through()) << schedule.name;
  }
}

TEST(FirstMessages, PassWhenPairsAreOpenedBefore) {
  using enum ScheduleKind;
  for (const ScheduleKind kind : {kGPipe, k1F1B, kInterleaved, kZbH1, kZbH2, kZbV, kDualPipeV, kInference}) {
    for (int ranks = 2; ranks <= 5; ++ranks) {
      for (int micro_batches = 1; micro_batches <= 8; ++micro_batches) {
        const Schedule schedule =
            make_schedule(kind, {.ranks = ranks, .chunks = default_chunks(kind), .micro_batches = micro_batches});
        SCOPED_TRACE(cat(schedule.name, ' ', ranks, " ranks, ", micro_batches, " micro-batches"));
        Lines lines;
        EXPECT_TRUE(open_all(schedule.rank_of, ranks, lines));
        EXPECT_TRUE(FirstBatch(schedule, lines).runs_through());
      }
    }
  }
}

}  // namespace
}  // namespace ds::pipeline
