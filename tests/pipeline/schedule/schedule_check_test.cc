#include "pipeline/schedule/schedule_check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "core/check.h"

namespace ds::pipeline {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::ThrowsMessage;
using enum ActionKind;
using enum ScheduleKind;

constexpr std::array kKinds = {kGPipe, k1F1B, kInterleaved, kZbH1, kZbH2, kZbV, kDualPipeV, kInference};

class Random {
 public:
  // In [low, high].
  int number(int low, int high) { return std::uniform_int_distribution<int>(low, high)(engine_); }
  template <class Items>
  const auto& one_of(const Items& items) {
    return items[static_cast<size_t>(number(0, static_cast<int>(items.size()) - 1))];
  }
  Schedule schedule(const std::vector<ScheduleKind>& kinds, int least_ranks, int most_ranks, int most_micro_batches) {
    const ScheduleKind kind = one_of(kinds);
    const bool free = kind == kInterleaved || kind == kInference;
    const bool v_shape = kind == kZbV || kind == kDualPipeV;
    return make_schedule(kind, {.ranks = number(least_ranks, most_ranks),
                                .chunks = free ? number(1, 4) : (v_shape ? 2 : 1),
                                .micro_batches = number(1, most_micro_batches)});
  }

 private:
  std::mt19937 engine_{20240607};
};

std::string described(const Schedule& schedule) {
  return cat(schedule.name, " ranks ", schedule.shape.ranks, " chunks ", schedule.shape.chunks, " micro-batches ",
             schedule.shape.micro_batches);
}

TEST(ScheduleCheck, EveryKindIsSoundForAnyNumbers) {
  Random random;
  for (int i = 0; i < 10'000; ++i) {
    const Schedule schedule = random.schedule({kKinds.begin(), kKinds.end()}, 1, 16, 40);
    ASSERT_THAT(schedule_problems(schedule), IsEmpty()) << described(schedule);
  }
}

TEST(ScheduleCheck, EveryKindIsSoundForFewMicroBatches) {
  for (const ScheduleKind kind : kKinds) {
    for (int ranks = 1; ranks <= 7; ++ranks) {
      for (int micro_batches = 1; micro_batches <= 15; ++micro_batches) {
        for (int chunks = 1; chunks <= 4; ++chunks) {
          const bool free = kind == kInterleaved || kind == kInference;
          const bool v_shape = kind == kZbV || kind == kDualPipeV;
          if (!free && chunks != (v_shape ? 2 : 1)) continue;
          const Schedule schedule = make_schedule(kind, {ranks, chunks, micro_batches});
          ASSERT_THAT(schedule_problems(schedule), IsEmpty()) << described(schedule);
        }
      }
    }
  }
}

// Where actions of some kinds stand: rank and position.
using Spot = std::pair<size_t, size_t>;

std::vector<Spot> spots_of(const Schedule& schedule, const std::function<bool(const Action&)>& wanted) {
  std::vector<Spot> spots;
  for (size_t rank = 0; rank < schedule.actions.size(); ++rank) {
    for (size_t i = 0; i < schedule.actions[rank].size(); ++i) {
      if (wanted(schedule.actions[rank][i])) spots.emplace_back(rank, i);
    }
  }
  return spots;
}

// Changes a sound schedule; returns the action that a problem must name, or "" when the schedule has nothing to change.
using Mutation = std::string (*)(Schedule& schedule, Random& random);

std::string drop(Schedule& schedule, Random& random, const std::function<bool(const Action&)>& wanted) {
  const std::vector<Spot> spots = spots_of(schedule, wanted);
  if (spots.empty()) return "";
  const auto [rank, i] = random.one_of(spots);
  std::vector<Action>& list = schedule.actions[rank];
  const std::string text = to_text(list[i]);
  list.erase(list.begin() + static_cast<std::ptrdiff_t>(i));
  return text;
}

std::string drop_receive(Schedule& schedule, Random& random) {
  return drop(schedule, random, [](const Action& action) { return is_recv(action.kind); });
}

std::string drop_send(Schedule& schedule, Random& random) {
  return drop(schedule, random, [](const Action& action) { return is_send(action.kind); });
}

std::string drop_compute(Schedule& schedule, Random& random) {
  return drop(schedule, random, [](const Action& action) { return is_compute(action.kind); });
}

std::string drop_end(Schedule& schedule, Random& random) {
  return drop(schedule, random, [](const Action& action) { return action.kind >= kReduce; });
}

std::string duplicate(Schedule& schedule, Random& random) {
  const auto [rank, i] = random.one_of(spots_of(schedule, [](const Action&) { return true; }));
  std::vector<Action>& list = schedule.actions[rank];
  const Action action = list[i];
  list.insert(list.begin() + random.number(0, static_cast<int>(list.size())), action);
  return to_text(action);
}

std::string move_to_another_rank(Schedule& schedule, Random& random) {
  const auto [rank, i] = random.one_of(spots_of(schedule, [](const Action& action) { return action.kind < kReduce; }));
  std::vector<Action>& list = schedule.actions[rank];
  const Action action = list[i];
  list.erase(list.begin() + static_cast<std::ptrdiff_t>(i));
  std::vector<Action>& other = schedule.actions[(rank + 1) % schedule.actions.size()];
  other.insert(other.begin() + random.number(0, static_cast<int>(other.size())), action);
  return to_text(action);
}

// Two actions of one rank change places; the first kind must come before the second, for the same micro-batch and
// stage.
std::string swap_kinds(Schedule& schedule, Random& random, ActionKind before, ActionKind after) {
  const std::vector<Spot> spots = spots_of(schedule, [&](const Action& action) { return action.kind == after; });
  if (spots.empty()) return "";
  const auto [rank, i] = random.one_of(spots);
  std::vector<Action>& list = schedule.actions[rank];
  const Action first = {before, list[i].stage, list[i].micro_batch};
  std::swap(list[i], *std::find(list.begin(), list.end(), first));
  return to_text({after, first.stage, first.micro_batch});
}

std::string weight_before_input(Schedule& schedule, Random& random) {
  return swap_kinds(schedule, random, kBackwardInput, kBackwardWeight);
}

std::string backward_before_forward(Schedule& schedule, Random& random) {
  return swap_kinds(schedule, random, kForward, kBackward);
}

std::string input_before_forward(Schedule& schedule, Random& random) {
  return swap_kinds(schedule, random, kForward, kBackwardInput);
}

std::string send_before_forward(Schedule& schedule, Random& random) {
  return swap_kinds(schedule, random, kForward, kSendActivation);
}

std::string forward_before_receive(Schedule& schedule, Random& random) {
  const std::vector<Spot> spots =
      spots_of(schedule, [](const Action& action) { return action.kind == kRecvActivation; });
  if (spots.empty()) return "";
  const auto [rank, i] = random.one_of(spots);
  std::vector<Action>& list = schedule.actions[rank];
  const Action forward = {kForward, list[i].stage, list[i].micro_batch};
  std::swap(list[i], *std::find(list.begin(), list.end(), forward));
  return to_text(forward);
}

std::string swap_receives(Schedule& schedule, Random& random) {
  std::map<std::pair<size_t, int>, std::vector<size_t>> channels;  // by receiving and sending rank
  for (const auto& [rank, i] : spots_of(schedule, [](const Action& action) { return is_recv(action.kind); })) {
    const Action& action = schedule.actions[rank][i];
    const int from = action.stage + (action.kind == kRecvActivation ? -1 : 1);
    channels[{rank, schedule.rank_of[from]}].push_back(i);
  }
  std::erase_if(channels, [](const auto& channel) { return channel.second.size() < 2; });
  if (channels.empty()) return "";
  const auto& [ranks, spots] = *std::next(channels.begin(), random.number(0, static_cast<int>(channels.size()) - 1));
  const int second = random.number(1, static_cast<int>(spots.size()) - 1);
  std::vector<Action>& list = schedule.actions[ranks.first];
  Action& earlier = list[spots[random.number(0, second - 1)]];
  std::swap(earlier, list[spots[second]]);
  return to_text(list[spots[second]]);
}

TEST(ScheduleCheck, EveryMutationIsCaughtAndNamed) {
  const std::vector<std::pair<const char*, Mutation>> mutations = {
      {"drop_receive", drop_receive},
      {"drop_send", drop_send},
      {"drop_compute", drop_compute},
      {"drop_end", drop_end},
      {"duplicate", duplicate},
      {"move_to_another_rank", move_to_another_rank},
      {"weight_before_input", weight_before_input},
      {"backward_before_forward", backward_before_forward},
      {"input_before_forward", input_before_forward},
      {"send_before_forward", send_before_forward},
      {"forward_before_receive", forward_before_receive},
      {"swap_receives", swap_receives},
  };
  const std::vector<ScheduleKind> training = {kGPipe, k1F1B, kInterleaved, kZbH1, kZbH2, kZbV, kDualPipeV};
  Random random;
  for (const auto& [name, mutation] : mutations) {
    int changed = 0;
    for (int i = 0; i < 300; ++i) {
      Schedule schedule = random.schedule(training, 2, 8, 12);
      const std::string text = mutation(schedule, random);
      if (text.empty()) continue;
      ++changed;
      const std::vector<std::string> problems = schedule_problems(schedule);
      ASSERT_FALSE(problems.empty()) << name << " of " << text << " in " << described(schedule);
      EXPECT_THAT(problems, Contains(AllOf(HasSubstr("rank "), HasSubstr("position"), HasSubstr(text))))
          << name << " of " << text << " in " << described(schedule);
    }
    EXPECT_GT(changed, 50) << name;
  }
}

// Two ranks, one stage each.
Schedule two_ranks(int micro_batches, const std::vector<std::vector<Action>>& compute) {
  return with_messages("mine", {.ranks = 2, .chunks = 1, .micro_batches = micro_batches}, {0, 1}, compute);
}

const std::vector<Action> kFirst = {{kForward, 0, 0}, {kBackward, 0, 0}};
const std::vector<Action> kSecond = {{kForward, 1, 0}, {kBackward, 1, 0}};

TEST(ScheduleCheck, ACircleIsPrinted) {
  const Schedule schedule = two_ranks(2, {{{kForward, 0, 0}, {kBackward, 0, 0}, {kForward, 0, 1}, {kBackward, 0, 1}},
                                          {{kForward, 1, 0}, {kForward, 1, 1}, {kBackward, 1, 0}, {kBackward, 1, 1}}});
  EXPECT_THAT(schedule_problems(schedule),
              ElementsAre("ranks wait for one another in a circle: rank 0 waits at position 3 in 0B0 for 0RB0 sent by "
                          "rank 1, which waits at position 3 in 1F1 for 1RF1 sent by rank 0"));
}

TEST(ScheduleCheck, ACircleOfThreeIsFoundFromOutside) {
  // Ranks 1 and 2 wait for one another, rank 0 for rank 1.
  const Schedule schedule = with_messages("mine", {.ranks = 3, .chunks = 1, .micro_batches = 2}, {0, 1, 2},
                                          {{{kForward, 0, 0}, {kForward, 0, 1}, {kBackward, 0, 0}, {kBackward, 0, 1}},
                                           {{kForward, 1, 0}, {kBackward, 1, 0}, {kForward, 1, 1}, {kBackward, 1, 1}},
                                           {{kForward, 2, 0}, {kForward, 2, 1}, {kBackward, 2, 0}, {kBackward, 2, 1}}});
  EXPECT_THAT(schedule_problems(schedule),
              ElementsAre(AllOf(HasSubstr("rank 1 waits at position 5 in 1B0 for 1RB0 sent "
                                          "by rank 2, which waits at position 3 in 2F1"),
                                Not(HasSubstr("rank 0 waits")))));
}

TEST(ScheduleCheck, MessagesNameRankPositionAndAction) {
  Schedule schedule = two_ranks(1, {kFirst, kSecond});
  ASSERT_THAT(schedule_problems(schedule), IsEmpty());
  std::vector<Action>& list = schedule.actions[1];
  ASSERT_EQ(to_text(list[0]), "1RF0");
  list.erase(list.begin());
  EXPECT_THAT(schedule_problems(schedule),
              ElementsAre("rank 0, position 2, 0SF0: rank 1 receives it with 1RF0, which is missing",
                          "rank 1, position 0, 1F0: needs 1RF0, which is missing"));
  list.pop_back();
  EXPECT_THAT(schedule_problems(schedule),
              Contains("rank 1, position 5, STEP: missing, expected REDUCE, REDUCE_TIED and STEP at the end"));
}

TEST(ScheduleCheck, TheEndComesOnceAndInItsOrder) {
  Schedule schedule = two_ranks(1, {kFirst, kSecond});
  const size_t count = schedule.actions[0].size();
  std::swap(schedule.actions[0][count - 1], schedule.actions[0][count - 2]);
  std::rotate(schedule.actions[1].begin(), schedule.actions[1].end() - 1, schedule.actions[1].end());
  const std::vector<std::string> problems = schedule_problems(schedule);
  EXPECT_THAT(problems, Contains(HasSubstr("rank 0, position 5, STEP: expected REDUCE, REDUCE_TIED and STEP once")));
  EXPECT_THAT(problems, Contains(HasSubstr("rank 1, position 0, STEP: expected")));

  Schedule inference = make_schedule(kInference, {.ranks = 2});
  inference.actions[1].push_back({.kind = kStep});
  EXPECT_THAT(schedule_problems(inference), ElementsAre("rank 1, position 2, STEP: this schedule has forwards only"));
}

TEST(ScheduleCheck, WholeBackwardAndPartsExcludeEachOther) {
  const Schedule both = two_ranks(1, {{{kForward, 0, 0}, {kBackward, 0, 0}, {kBackwardWeight, 0, 0}}, kSecond});
  EXPECT_THAT(schedule_problems(both), Contains(HasSubstr("0W0: is a part of 0B0 (position 3)")));
  const Schedule half = two_ranks(1, {{{kForward, 0, 0}, {kBackwardInput, 0, 0}}, kSecond});
  EXPECT_THAT(schedule_problems(half), Contains(HasSubstr("rank 0, 0W0, which completes 0I0: missing")));
}

TEST(ScheduleCheck, NoMessageStaysOnARank) {
  Schedule schedule = make_schedule(kZbV, {.ranks = 2, .chunks = 2, .micro_batches = 3});
  schedule.actions[1].insert(schedule.actions[1].begin(), {kRecvActivation, 2, 0});
  EXPECT_THAT(schedule_problems(schedule), ElementsAre(HasSubstr("rank 1, position 0, 2RF0: no message goes there")));
}

TEST(ScheduleCheck, NumbersBeyondTheShapeAreNamed) {
  Schedule schedule = two_ranks(1, {kFirst, kSecond});
  schedule.actions[0].insert(schedule.actions[0].begin(), {kForward, 0, 1});
  schedule.actions[1].insert(schedule.actions[1].begin(), {kRecvActivation, 2, 0});
  const std::vector<std::string> problems = schedule_problems(schedule);
  EXPECT_THAT(problems, ElementsAre(HasSubstr("rank 0, position 0, 0F1: expected a stage in [0, 2)"),
                                    HasSubstr("rank 1, position 0, 2RF0: expected a stage in [0, 2)")));
  schedule.rank_of = {0, 2};
  EXPECT_THAT(schedule_problems(schedule), ElementsAre("stage 1: expected a rank in [0, 2), found 2"));
  schedule.rank_of = {0};
  EXPECT_THAT(schedule_problems(schedule), ElementsAre(HasSubstr("each of 2 stages, found 1")));
  schedule.actions.pop_back();
  EXPECT_THAT(schedule_problems(schedule), ElementsAre(HasSubstr("each of 2 ranks, found 1")));
  schedule.shape.micro_batches = 0;
  EXPECT_THAT(schedule_problems(schedule), ElementsAre(HasSubstr("found 2, 1 and 0")));
}

TEST(ScheduleCheck, RequireSoundThrowsWithAllMistakes) {
  Schedule schedule = two_ranks(1, {kFirst, kSecond});
  EXPECT_NO_THROW(require_sound(schedule));
  schedule.actions[0].clear();
  EXPECT_THAT([&] { require_sound(schedule); },
              ThrowsMessage<ConfigError>(AllOf(HasSubstr("pipeline schedule mine: mistakes:"), HasSubstr("0F0"),
                                               HasSubstr("\n  rank 0, position 0, STEP: missing"))));
}

TEST(ScheduleCheck, AHundredMistakesAreEnough) {
  Schedule schedule = make_schedule(kGPipe, {.ranks = 2, .micro_batches = 100});
  for (std::vector<Action>& list : schedule.actions) list.clear();
  EXPECT_THAT(schedule_problems(schedule), AllOf(::testing::SizeIs(101), Contains("and 306 more")));
}

}  // namespace
}  // namespace ds::pipeline
