#include "comm/flight/flight_recorder.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>
#include <thread>

#include "comm/flight/contract.h"
#include "comm/flight/host_stack.h"
#include "comm/flight/rank_list.h"
#include "core/check.h"
#include "tests/comm/flight/flight_logs.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thread_ranks.h"

namespace drill {

void wait_here(const std::atomic<bool>& go_on);
void wait_here(const std::atomic<bool>& go_on) {
  while (!go_on) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

}  // namespace drill

namespace ds::comm::testing {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(RankList, IsShortAndComesBack) {
  const std::vector<std::pair<std::vector<int>, std::string>> lists = {{{0}, "0"},
                                                                       {{0, 1}, "0,1"},
                                                                       {{0, 1, 2, 3, 8}, "0-3,8"},
                                                                       {{5, 3, 1}, "5,3,1"},
                                                                       {{0, 8, 16, 24}, "0-24/8"},
                                                                       {{1, 2, 4, 6, 8, 9}, "1,2-8/2,9"}};
  for (const auto& [ranks, text] : lists) {
    EXPECT_EQ(rank_list_text(ranks), text);
    EXPECT_EQ(parse_rank_list(text), ranks);
  }
  EXPECT_THAT(parse_rank_list("0-2,x"), ElementsAre(0, 1, 2));
  EXPECT_EQ(ranks_in_words({3}), "rank 3");
  EXPECT_EQ(ranks_in_words({5, 0, 1}), "ranks 0, 1 and 5");
  EXPECT_EQ(ranks_in_words({0, 1, 2, 9}), "ranks 0-2 and 9");
}

TEST(FlightRecorder, KeepsTheLastOperations) {
  LoggedRank rank(1, 4, 8);
  for (int i = 1; i <= 20; ++i) rank.issue(all_reduce_of(i, cat("number ", i)));
  const FlightLog log = rank.log();
  ASSERT_EQ(log.entries.size(), 8);
  EXPECT_EQ(log.entries.front().label.text(), "number 13");
  EXPECT_EQ(log.last()->label.text(), "number 20");
  EXPECT_EQ(log.last()->elements, 20);
  EXPECT_EQ(log.last()->position, 20);
  EXPECT_EQ(log.last()->state, FlightState::kFinished);
  EXPECT_GE(log.last()->ended_ns, log.last()->waited_ns);
  EXPECT_EQ(log.waiting(), nullptr);
  EXPECT_EQ(log.groups.at(0).position, 20);
  EXPECT_EQ(log.groups.at(0).ranks.text(), "0-3");
}

TEST(FlightRecorder, SurvivesAsBytes) {
  LoggedRank rank(1, 4, 8);
  rank.recorder().phase("backward", 7, 2);
  for (int i = 1; i <= 20; ++i) rank.issue(all_reduce_of(i, cat("number ", i)));
  rank.wait_in(all_reduce_of(5, "the one"));
  FlightLog log = rank.log(3);
  log.stack = {"a", "b"};
  log.neighbours[2] = 'T';
  log.silent_seconds = 1.5;
  const FlightLog whole = log_from_bytes(to_bytes(log), "test");
  EXPECT_EQ(whole.entries.size(), 8);
  EXPECT_EQ(whole.stack, log.stack);
  EXPECT_EQ(whole.neighbours, log.neighbours);
  EXPECT_EQ(whole.silent_seconds, 1.5);
  EXPECT_EQ(whole.header.phase.text(), "backward");
  EXPECT_EQ(whole.header.step, 7);
  const FlightLog board = log_from_bytes(to_board(log), "test");
  EXPECT_EQ(board.entries.size(), 1);
  EXPECT_EQ(board.waiting()->label.text(), "the one");
  EXPECT_EQ(board.groups.at(0).position, 21);

  std::string damaged = to_bytes(log);
  for (const size_t size : {size_t{0}, size_t{7}, size_t{100}, damaged.size() / 2, damaged.size() - 1}) {
    EXPECT_THROW(log_from_bytes(damaged.substr(0, size), "test"), ConfigError) << size;
  }
  damaged[0] = 'X';
  EXPECT_THROW(log_from_bytes(damaged, "test"), ConfigError);
}

// A file of the recorder's own can be read while it is in use, and goes with it, unless it is to be kept.
TEST(FlightRecorder, LiesInAFile) {
  const test::ScratchFolder scratch;
  const std::filesystem::path folder = std::filesystem::path(scratch / "job");
  std::filesystem::create_directory(folder);
  for (const bool keep : {false, true}) {
    auto recorder = std::make_shared<FlightRecorder>(
        FlightRecorderOptions{.rank = 0, .world_size = 2, .host = "here", .file = (folder / "rank0.flight").string()});
    recorder->add_group("world", {0, 1}, 0);
    recorder->follow(recorder->begin(0, all_reduce_of(9, "seen")), Work()).wait();
    EXPECT_EQ(read_flight_file(folder / "rank0.flight").last()->label.text(), "seen");
    if (keep) recorder->keep();
    recorder.reset();
    EXPECT_EQ(std::filesystem::exists(folder / "rank0.flight"), keep);
    EXPECT_EQ(std::filesystem::exists(folder), keep);
    std::filesystem::create_directory(folder);
  }
  EXPECT_THROW(FlightRecorder({.file = (folder / "none" / "rank0.flight").string()}), IoError);
}

// A file cut off under a mapping is a bus error at the next record.
TEST(FlightRecorder, AFileHasOneWriter) {
  const test::ScratchFolder folder;
  const FlightRecorderOptions options{.file = folder / "rank0.flight"};
  auto first = std::make_shared<FlightRecorder>(options);
  first->add_group("world", {0}, 0);
  EXPECT_THROW(FlightRecorder{options}, FlightFileInUse);
  first->follow(first->begin(0, all_reduce_of(9, "goes on")), Work()).wait();
  EXPECT_EQ(read_flight_file(options.file).last()->label.text(), "goes on");
  first->keep();
  first.reset();
  const FlightRecorder second(options);
  EXPECT_EQ(read_flight_file(options.file).last(), nullptr) << "what was left of the first is not the second's";
}

// Of a device that never gets there.
class NeverDone final : public WorkState {
 public:
  bool is_completed() override { return false; }
  void wait() override {}  // a stream waits
};

TEST(FlightRecorder, OperationsOfADeviceThatNobodyLooksAfterDoNotWait) {
  LoggedRank rank(0, 2, 256);
  Collective collective = all_reduce_of(4, "bucket");
  collective.input = collective.output = at::empty({4}, at::TensorOptions().device(at::kMeta));
  constexpr size_t kMany = 100;
  for (size_t i = 0; i < kMany; ++i) {
    FlightRecorder& recorder = rank.recorder();
    recorder.follow(recorder.begin(0, collective), Work(std::make_shared<NeverDone>())).wait();
  }
  const FlightLog log = rank.log();
  ASSERT_EQ(log.entries.size(), kMany);
  const auto waiting = std::count_if(log.entries.begin(), log.entries.end(),
                                     [](const FlightEntry& entry) { return entry.state == FlightState::kWaiting; });
  EXPECT_LT(waiting, kMany);
  EXPECT_EQ(log.waiting()->position, kMany - static_cast<size_t>(waiting) + 1) << "the newest still wait";
  for (const FlightEntry& entry : log.entries) {
    EXPECT_EQ(entry.ended_ns == 0, entry.state == FlightState::kWaiting);
    EXPECT_TRUE(entry.state == FlightState::kWaiting || entry.state == FlightState::kReleased);
  }
}

TEST(FlightRecorder, NoCollectiveBeginsAfterTheVerdict) {
  LoggedRank rank(0, 2);
  rank.recorder().doom("rank 1 is to blame");
  EXPECT_THROW(
      {
        try {
          rank.issue(all_reduce_of(1, "late"));
        } catch (const CommError& error) {
          EXPECT_STREQ(error.what(), "rank 1 is to blame");
          throw;
        }
      },
      CommError);
}

TEST(FlightRecorder, ManyGroupsAndLongNames) {
  LoggedRank rank(0, 2);
  LoggedRank other(1, 2);
  const std::string name(100, 'x');
  for (int g = 0; g < 100; ++g) {
    const int own = rank.recorder().add_group(name + std::to_string(g % 2), {0, 1}, 0);
    const int theirs = other.recorder().add_group(name + std::to_string(g % 2), {0, 1}, 1);
    rank.issue(all_reduce_of(g + 1, "x"), own);
    // Groups that are not told apart are not compared: they may be of different ranks.
    other.issue(all_reduce_of(g < 62 ? g + 1 : 7, "x"), theirs);
  }
  EXPECT_EQ(rank.log().groups.size(), kFlightGroups);
  EXPECT_FALSE(find_breach({rank.log(), other.log()}));
  EXPECT_EQ(first_difference({rank.log(), other.log()}), "");
  std::set<std::string> names;
  for (const FlightGroup& group : rank.log().groups) names.insert(group.name.text());
  EXPECT_EQ(names.size(), kFlightGroups);

  std::vector<int> irregular;
  for (int r = 0; r < 400; ++r) irregular.push_back(r * r);
  LoggedRank wide(0, 1 << 20);
  wide.recorder().add_group("wide", irregular, 0);
  const std::vector<int> known = parse_rank_list(wide.log().groups.back().ranks.text());
  ASSERT_GT(known.size(), 10);
  EXPECT_TRUE(std::equal(known.begin(), known.end(), irregular.begin()));
}

// What a real communicator writes down, groups made from it included.
TEST(FlightRecorder, RecordsCommunicators) {
  std::array<FlightLog, 3> logs;
  ds::test::run_ranks(3, [&](Communicator& world) {
    auto recorder =
        std::make_shared<FlightRecorder>(FlightRecorderOptions{.rank = world.rank(), .world_size = 3, .host = "h"});
    world.observe_with(recorder);
    const at::Tensor tensor = at::ones({6});
    world.all_reduce(tensor, ReduceOp::kSum, "sum").wait();
    const auto pair = world.new_group({0, 2}, "pair");
    if (pair) pair->broadcast(tensor, 1, "weights").wait();
    if (world.rank() == 0) world.isend(tensor, 1).wait();
    if (world.rank() == 1) world.irecv(tensor, 0).wait();
    { const Work dropped = world.all_reduce(at::ones({2}), ReduceOp::kMax, "dropped"); }
    world.barrier("end");
    logs[static_cast<size_t>(world.rank())] = recorder->log();
  });
  EXPECT_FALSE(find_breach({logs[0], logs[1], logs[2]}));
  EXPECT_EQ(first_difference({logs[0], logs[1], logs[2]}), "");
  const FlightLog& last = logs[2];
  ASSERT_EQ(last.groups.size(), 2);
  EXPECT_EQ(last.groups[1].ranks.text(), "0,2");
  EXPECT_EQ(last.groups[1].own, 1);
  EXPECT_EQ(logs[1].groups.size(), 1);
  std::vector<std::string> texts;
  for (const FlightEntry& entry : last.entries) texts.push_back(operation_text(entry, last.groups[entry.group]));
  EXPECT_THAT(texts, ElementsAre("all_reduce 'sum' (Float[6], sum, number 1 of group world)",
                                 "barrier 'new_group pair' (number 2 of group world)",
                                 "broadcast 'weights' (Float[6], root 1, number 1 of group pair)",
                                 "all_reduce 'dropped' (Float[2], max, number 3 of group world)",
                                 "barrier 'end' (number 4 of group world)"));
  EXPECT_EQ(last.entries[1].state, FlightState::kFinished);
  EXPECT_EQ(last.entries[3].state, FlightState::kReleased);
  EXPECT_THAT(operation_text(logs[1].entries[2], logs[1].groups[0]),
              "recv (Float[6], from rank 0, message 1 of group world)");
}

TEST(Contract, RanksThatAreApartStillCompare) {
  for (const int apart : {0, 1, 5, 30, 700}) {
    for (const int count : {1, 63, 64, 65, 1023, 1024, 5000}) {
      LoggedRank ahead(0, 2, 8);
      LoggedRank behind(1, 2, 8);
      LoggedRank other(1, 2, 8);
      for (int i = 0; i < count; ++i) {
        behind.issue(all_reduce_of(1, "x"));
        other.issue(all_reduce_of(i == 0 ? 2 : 1, "x"));
      }
      for (int i = 0; i < count + apart; ++i) ahead.issue(all_reduce_of(1, "x"));
      EXPECT_FALSE(find_breach({ahead.log(), behind.log()}));
      // Marks of the power of two that spans the distance, where both have come to one.
      const int shift = *std::find_if(kMarkShifts.begin(), kMarkShifts.end(), [&](int s) { return (1 << s) >= apart; });
      if (count < 1 << shift) continue;
      EXPECT_TRUE(find_breach({ahead.log(), other.log()})) << count << " and " << apart << " more";
    }
  }
}

TEST(Contract, TellsWhatTheRecordsHaveForgotten) {
  auto ranks = logged_ranks(2, 4);
  ranks[1]->issue(all_reduce_of(2, "y"));
  ranks[0]->issue(all_reduce_of(2, "x"));
  for (int i = 0; i < 10; ++i) {
    for (auto& rank : ranks) rank->issue(all_reduce_of(1, "same"));
  }
  EXPECT_THAT(first_difference(logs_of(ranks)),
              AllOf(HasSubstr("issued different collectives at or before number "),
                    HasSubstr("of group world, which their records do not reach back to")));
}

TEST(Contract, EveryPartCounts) {
  const auto differ = [](const Collective& a, const Collective& b) {
    auto ranks = logged_ranks(2);
    ranks[0]->issue(a);
    ranks[1]->issue(b);
    return find_breach(logs_of(ranks)).has_value();
  };
  const Collective plain = all_reduce_of(4, "x");
  EXPECT_FALSE(differ(plain, all_reduce_of(4, "x")));
  EXPECT_TRUE(differ(plain, all_reduce_of(5, "x")));
  EXPECT_TRUE(differ(plain, all_reduce_of(4, "y")));
  EXPECT_TRUE(differ(plain, all_reduce_of(4, "x", at::kInt)));
  Collective changed = plain;
  changed.op = ReduceOp::kMax;
  EXPECT_TRUE(differ(plain, changed));
  changed = plain;
  changed.kind = CollectiveKind::kBroadcast;
  EXPECT_TRUE(differ(plain, changed));
  Collective from_one = changed;
  from_one.peer = 1;
  EXPECT_TRUE(differ(changed, from_one));
  // On the root of a gather there is an output as well.
  Collective gather{.kind = CollectiveKind::kGather, .input = at::empty({4})};
  Collective root = gather;
  root.output = at::empty({8});
  EXPECT_FALSE(differ(gather, root));
}

TEST(HostStack, NamesWhatAThreadDoes) {
  std::atomic<bool> go_on{false};
  std::atomic<HostStack*> stack{nullptr};
  std::thread thread([&] {
    HostStack own;
    stack = &own;
    drill::wait_here(go_on);
  });
  while (stack == nullptr) std::this_thread::yield();
  for (int repeat = 0; repeat < 20; ++repeat) {
    EXPECT_THAT(stack.load()->frames(std::chrono::seconds(10)), Contains("drill::wait_here"));
  }
  go_on = true;
  thread.join();
}

}  // namespace
}  // namespace ds::comm::testing
