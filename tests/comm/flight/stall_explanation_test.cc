#include "comm/flight/stall_explanation.h"

#include <gmock/gmock.h>

#include <memory>
#include <thread>
#include <vector>

#include "tests/comm/flight/flight_logs.h"

namespace ds::comm::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

constexpr double kDeadAfter = 5;

StallExplanation explain(const std::vector<FlightLog>& logs) {
  return explain_stall(logs, logs.front().header.world_size, kDeadAfter);
}

TEST(StallExplanation, NobodyWaits) {
  auto ranks = logged_ranks(3);
  for (auto& rank : ranks) rank->issue(all_reduce_of(4, "loss"));
  const StallExplanation stall = explain(logs_of(ranks));
  EXPECT_EQ(stall.cause, StallCause::kNone);
  EXPECT_THAT(stall.sentence, IsEmpty());
  EXPECT_FALSE(stall.hopeless());
}

TEST(StallExplanation, ALateRankIsNamedWithWhatItDoes) {
  auto ranks = logged_ranks(4);
  for (auto& rank : ranks) rank->issue(all_reduce_of(4, "loss"));
  for (const int r : {0, 1, 3}) ranks[static_cast<size_t>(r)]->wait_in(all_reduce_of(1000, "bucket 3"));
  ranks[2]->recorder().phase("backward", 12, 1);
  auto logs = logs_of(ranks, 31);
  logs[2].stack = {"read", "load_sample", "main"};
  const StallExplanation stall = explain(logs);
  EXPECT_EQ(stall.cause, StallCause::kLate);
  EXPECT_THAT(stall.guilty, ElementsAre(2));
  EXPECT_NEAR(stall.seconds, 31, 0.5);
  EXPECT_FALSE(stall.hopeless());
  EXPECT_THAT(stall.sentence,
              AllOf(StartsWith("stalled for 31 s: ranks 0, 1 and 3 wait in all_reduce 'bucket 3' (Float[1000], sum, "
                               "number 2 of group world); rank 2 (host, pid "),
                    HasSubstr("has not entered it: it is alive, for 0.0 s in backward, step 12, micro-batch 1, at read "
                              "< load_sample < main; the last it entered is all_reduce 'loss' (Float[4], sum, number 1 "
                              "of group world)")));
}

TEST(StallExplanation, ASilentRankIsDead) {
  auto ranks = logged_ranks(2);
  ranks[0]->wait_in(all_reduce_of(4, "loss"));
  auto logs = logs_of(ranks, 10);
  logs[1].silent_seconds = 9;
  EXPECT_THAT(explain(logs).sentence, HasSubstr("it gives no sign of life for 9.0 s: its host or its network may be "
                                                "gone; it has issued no collective yet"));
  logs[0].neighbours[1] = 'T';
  EXPECT_THAT(explain(logs).sentence, HasSubstr("it is stopped by a signal (SIGSTOP, or a debugger) for 9.0 s; `kill "
                                                "-CONT "));
  logs[0].neighbours[1] = '-';
  EXPECT_THAT(explain(logs).sentence, HasSubstr("its process is gone"));
  EXPECT_EQ(explain(logs).cause, StallCause::kDead);
  EXPECT_TRUE(explain(logs).hopeless());
}

// A rank that is stopped in the middle of an operation, which all have entered.
TEST(StallExplanation, ARankThatFallsSilentAmongTheOthersIsDead) {
  auto ranks = logged_ranks(3);
  for (auto& rank : ranks) rank->wait_in(all_reduce_of(4, "loss"));
  auto logs = logs_of(ranks, 10);
  EXPECT_EQ(explain(logs).cause, StallCause::kTransport);
  logs[1].silent_seconds = 9;
  logs[0].neighbours[1] = 'T';
  const StallExplanation stall = explain(logs);
  EXPECT_EQ(stall.cause, StallCause::kDead);
  EXPECT_TRUE(stall.hopeless());
  EXPECT_THAT(stall.guilty, ElementsAre(1));
  EXPECT_THAT(stall.sentence, HasSubstr("is among them: it is stopped by a signal (SIGSTOP, or a debugger) for 9.0 s"));
}

TEST(StallExplanation, ARankThatHasEndedIsNamed) {
  auto ranks = logged_ranks(2);
  ranks[0]->wait_in(all_reduce_of(4, "loss"));
  ranks[1]->recorder().leave();
  const StallExplanation stall = explain(logs_of(ranks, 10));
  EXPECT_EQ(stall.cause, StallCause::kDead);
  EXPECT_THAT(stall.sentence, HasSubstr("has ended in good order"));
}

TEST(StallExplanation, ARankOfWhichNothingIsKnown) {
  auto ranks = logged_ranks(3);
  ranks[0]->wait_in(all_reduce_of(4, "loss"));
  ranks[1]->wait_in(all_reduce_of(4, "loss"));
  auto logs = logs_of(ranks, 10);
  logs.pop_back();
  const StallExplanation stall = explain(logs);
  EXPECT_EQ(stall.cause, StallCause::kLate);
  EXPECT_THAT(stall.sentence, HasSubstr("nothing is known of rank 2"));
}

// Ranks 0 and 1 wait for 2, which waits for 3: that one is to blame.
TEST(StallExplanation, BlameGoesToTheEndOfTheChain) {
  auto ranks = logged_ranks(4);
  for (const int r : {2, 3}) ranks[static_cast<size_t>(r)]->recorder().add_group("pair", {2, 3}, r - 2);
  ranks[0]->wait_in(all_reduce_of(4, "loss"));
  ranks[1]->wait_in(all_reduce_of(4, "loss"));
  ranks[2]->wait_in(all_reduce_of(8, "expert"), 1);
  ranks[3]->issue(all_reduce_of(4, "loss"));
  const StallExplanation stall = explain(logs_of(ranks, 10));
  EXPECT_EQ(stall.cause, StallCause::kLate);
  EXPECT_THAT(stall.guilty, ElementsAre(3));
}

TEST(StallExplanation, ACircleIsTold) {
  auto ranks = logged_ranks(3);
  ranks[0]->wait_in(message_of(CollectiveKind::kRecv, 1));
  ranks[1]->wait_in(message_of(CollectiveKind::kRecv, 2));
  ranks[2]->wait_in(message_of(CollectiveKind::kRecv, 0));
  const StallExplanation stall = explain(logs_of(ranks, 10));
  EXPECT_EQ(stall.cause, StallCause::kCircle);
  EXPECT_TRUE(stall.hopeless());
  EXPECT_THAT(stall.sentence, AllOf(HasSubstr("rank 0 waits in recv (Float[3], from rank 1, message 1 of group world) "
                                              "for rank 1"),
                                    HasSubstr("rank 2 waits in recv"), HasSubstr("for rank 0")));
}

// Two ranks in two groups: rank 0 waits in the world, rank 1 in "parameters".
std::vector<std::unique_ptr<LoggedRank>> ranks_in_two_groups() {
  auto ranks = logged_ranks(2);
  for (int r = 0; r < 2; ++r) ranks[static_cast<size_t>(r)]->recorder().add_group("parameters", {0, 1}, r);
  Collective saved = all_reduce_of(1, "length of a text");
  saved.phase = "save_checkpoint";
  Collective gathered = all_reduce_of(4, "bucket 0");
  gathered.phase = "backward";
  ranks[0]->wait_in(saved);
  ranks[1]->wait_in(gathered, 1);
  return ranks;
}

TEST(FindCircle, IsSeenAsSoonAsItIsThere) {
  const std::vector<FlightLog> logs = logs_of(ranks_in_two_groups(), 1);
  std::vector<FlightLog> boards;
  for (const FlightLog& log : logs) boards.push_back(log_from_bytes(to_board(log), "board"));
  const std::vector<WaitInCircle> circle = find_circle(boards, 2);
  ASSERT_EQ(circle.size(), 2U);
  EXPECT_EQ(circle[0].rank, 0);
  EXPECT_EQ(circle[1].rank, 1);
  EXPECT_EQ(circle[0].operation, logs[0].waiting()->sequence);
  EXPECT_THAT(explain(logs).sentence,
              AllOf(HasSubstr("rank 0 is in save_checkpoint(), rank 1 in backward(); rank 0 waits in all_reduce "),
                    HasSubstr("number 1 of group world) of save_checkpoint() for rank 1")));
}

TEST(FindCircle, IsNoneWhereSomebodyMayGoOn) {
  EXPECT_TRUE(find_circle(logs_of(ranks_in_two_groups(), 0.1), 2).empty()) << "they have just begun to wait";
  auto ranks = ranks_in_two_groups();
  std::thread([&] { ranks[1]->issue(all_reduce_of(4, "of another thread"), 1); }).join();
  EXPECT_TRUE(find_circle(logs_of(ranks, 1), 2).empty())
      << "rank 1 has another thread, which may enter what rank 0 is in";

  auto late = logged_ranks(3);
  for (auto& rank : late) rank->recorder().add_group("pair", {0, 1}, rank == late[1] ? 1 : 0);
  late[0]->wait_in(all_reduce_of(4, "loss"));
  late[1]->wait_in(all_reduce_of(4, "expert"), 1);
  EXPECT_TRUE(find_circle(logs_of(late, 1), 3).empty()) << "rank 2 does not wait";
}

// Returns what rank 0 sees of ranks that wait for a second.
std::vector<FlightLog> boards_of(const std::vector<std::unique_ptr<LoggedRank>>& ranks) {
  std::vector<FlightLog> boards;
  for (const FlightLog& log : logs_of(ranks, 1)) boards.push_back(log_from_bytes(to_board(log), "board"));
  return boards;
}

TEST(FindCircle, GoesOverMessagesThatNobodyHasSent) {
  auto ranks = logged_ranks(2);
  ranks[0]->wait_in(message_of(CollectiveKind::kRecv, 1));
  ranks[1]->wait_in(message_of(CollectiveKind::kRecv, 0));
  EXPECT_EQ(find_circle(boards_of(ranks), 2).size(), 2U);

  auto apart = logged_ranks(3);
  apart[0]->wait_in(message_of(CollectiveKind::kRecv, 1));
  for (const int r : {1, 2}) apart[static_cast<size_t>(r)]->wait_in(all_reduce_of(4, "loss"));
  const std::vector<FlightLog> boards = boards_of(apart);
  EXPECT_EQ(find_circle(boards, 3).size(), 2U);
  EXPECT_THAT(explain(boards).sentence,
              AllOf(HasSubstr("rank 0 waits in recv"), HasSubstr("for rank 1, rank 1 waits in all_reduce 'loss'")));

  auto sending = logged_ranks(2);
  for (const int r : {0, 1}) sending[static_cast<size_t>(r)]->wait_in(message_of(CollectiveKind::kSend, 1 - r));
  EXPECT_EQ(find_circle(boards_of(sending), 2).size(), 2U) << "both send, and nobody receives";
}

// Rank 1 has sent what rank 0 waits for, before much else: it is on its way.
TEST(FindCircle, IsNoneWhereTheMessageWasSent) {
  auto ranks = logged_ranks(2);
  ranks[1]->issue(message_of(CollectiveKind::kSend, 0));
  ranks[0]->wait_in(message_of(CollectiveKind::kRecv, 1));
  for (int i = 0; i < 3; ++i) ranks[1]->issue(message_of(CollectiveKind::kSend, 1));
  ranks[1]->wait_in(all_reduce_of(4, "loss"));
  EXPECT_TRUE(find_circle(boards_of(ranks), 2).empty());

  auto later = logged_ranks(2);
  later[1]->issue(message_of(CollectiveKind::kSend, 0));
  later[0]->issue(message_of(CollectiveKind::kRecv, 1));
  later[0]->wait_in(message_of(CollectiveKind::kRecv, 1));
  later[1]->wait_in(all_reduce_of(4, "loss"));
  EXPECT_EQ(find_circle(boards_of(later), 2).size(), 2U) << "one message was sent, and rank 0 waits for another";
}

// A receiver puts aside what comes with another tag, so that a large message moves on while both wait.
TEST(FindCircle, IsNoneWhereAMessageIsPutAside) {
  auto ranks = logged_ranks(3);
  ranks[0]->wait_in(message_of(CollectiveKind::kSend, 1));
  Collective later = message_of(CollectiveKind::kRecv, 0);
  later.tag = 2;
  ranks[1]->wait_in(later);
  ranks[2]->wait_in(all_reduce_of(4, "loss"));
  EXPECT_TRUE(find_circle(boards_of(ranks), 3).empty());
}

TEST(StallExplanation, AMessageThatWasSentIsNoFaultOfTheSender) {
  auto ranks = logged_ranks(2);
  ranks[0]->wait_in(message_of(CollectiveKind::kRecv, 1));
  ranks[1]->issue(message_of(CollectiveKind::kSend, 0));
  EXPECT_EQ(explain(logs_of(ranks, 10)).cause, StallCause::kTransport);
  auto later = logged_ranks(2);
  later[0]->issue(message_of(CollectiveKind::kRecv, 1));
  later[0]->wait_in(message_of(CollectiveKind::kRecv, 1));
  later[1]->issue(message_of(CollectiveKind::kSend, 0));
  const StallExplanation stall = explain(logs_of(later, 10));
  EXPECT_EQ(stall.cause, StallCause::kLate);
  EXPECT_THAT(stall.guilty, ElementsAre(1));
}

TEST(StallExplanation, AllHaveCome) {
  auto ranks = logged_ranks(2);
  for (auto& rank : ranks) rank->wait_in(all_reduce_of(4, "loss"));
  const StallExplanation stall = explain(logs_of(ranks, 10));
  EXPECT_EQ(stall.cause, StallCause::kTransport);
  EXPECT_FALSE(stall.hopeless());
  EXPECT_THAT(stall.sentence, HasSubstr("all ranks have entered it, and the data does not arrive"));
}

TEST(StallExplanation, DifferentCollectivesComeFirst) {
  auto ranks = logged_ranks(3);
  for (auto& rank : ranks) rank->issue(all_reduce_of(4, "loss"));
  ranks[0]->wait_in(all_reduce_of(4, "a"));
  ranks[1]->wait_in(all_reduce_of(4, "b"));
  ranks[2]->wait_in(all_reduce_of(4, "a"));
  const StallExplanation stall = explain(logs_of(ranks, 10));
  EXPECT_EQ(stall.cause, StallCause::kDifference);
  EXPECT_TRUE(stall.hopeless());
  EXPECT_EQ(stall.sentence,
            "ranks issued different collectives: ranks 0 and 2 issued all_reduce 'a' (Float[4], sum, number 2 of group "
            "world), rank 1 all_reduce 'b' (Float[4], sum, number 2 of group world)");
}

TEST(StallExplanation, ReportsEachRank) {
  auto ranks = logged_ranks(2);
  ranks[1]->issue(all_reduce_of(4, "loss"));
  ranks[1]->wait_in(all_reduce_of(8, "bucket 0"));
  EXPECT_THAT(rank_report(ranks[1]->log(7), 1),
              AllOf(StartsWith("rank 1 (host, pid "), HasSubstr("group world (ranks 0,1): 2 collectives\n"),
                    HasSubstr("all_reduce 'bucket 0' (Float[8], sum, number 2 of group world): waiting, issued "),
                    HasSubstr(", waits for 7.0 s\n"), ::testing::Not(HasSubstr("'loss'"))));
}

}  // namespace
}  // namespace ds::comm::testing
