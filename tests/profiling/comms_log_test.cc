// What is timed, from when to when, on a clock of the test's; and among ranks that are threads.
#include "profiling/comms_log.h"

#include <ATen/ops/ones.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/log.h"
#include "dsengine/comm.h"
#include "profiling/comms_table.h"
#include "tests/support/thread_ranks.h"

namespace ds::profiling {
namespace {

using comm::Collective;
using comm::CollectiveKind;
using comm::Work;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

LoggedOperations all_operations() {
  LoggedOperations all;
  all.fill(true);
  return all;
}

// Ends when it is waited for, and moves the clock there. `seconds` below 0: it fails.
class WaitedWork final : public comm::WorkState {
 public:
  WaitedWork(double& now, double seconds) : now_(now), seconds_(seconds) {}
  bool is_completed() override { return false; }
  void wait() override {
    if (seconds_ < 0) throw CommError("a rank is gone");
    now_ += seconds_;
  }

 private:
  double& now_;
  double seconds_;
};

// A log with the test's clock, and operations of a group of two ranks that no other rank is needed for.
class TimedByHand : public ::testing::Test {
 protected:
  void log_with(const CommsLogOptions& options) {
    log_ = std::make_shared<CommsLog>(options, [this] { return now_; });
    observer_ = log_->observer_of({0, 1});
    group_ = observer_->add_group("world", {0, 1}, 0);
  }
  void SetUp() override { log_with({.operations = all_operations()}); }

  // Calls launch(collective), as an implementation that is given it.
  template <class Launch>
  Work issue(CollectiveKind kind, Launch&& launch, int64_t elements = 256, const std::string& label = "") {
    const at::Tensor tensor = at::ones({elements});
    Collective collective{.kind = kind, .input = tensor, .output = tensor, .label = label};
    return observer_->observe(group_, collective, [&] { return launch(collective); });
  }
  // Known to its implementation as soon as somebody has waited for so long.
  Work issue_waited(CollectiveKind kind, double seconds, int64_t elements = 256, const std::string& label = "") {
    return issue(
        kind, [&](Collective&) { return Work(std::make_shared<WaitedWork>(now_, seconds)); }, elements, label);
  }

  double now_ = 100;
  std::shared_ptr<CommsLog> log_;
  std::shared_ptr<comm::CollectiveObserver> observer_;
  int group_ = 0;
};

TEST_F(TimedByHand, EndsWhenTheImplementationSaysSoAndNotAtTheWait) {
  std::vector<std::shared_ptr<comm::OperationTimer>> timers;
  const Work work = issue(CollectiveKind::kAllReduce, [&](Collective& collective) {
    timers = collective.timers;
    return Work(std::make_shared<WaitedWork>(now_, 5));
  });
  EXPECT_THAT(log_->records(true), IsEmpty()) << "it has not ended";
  now_ += 0.25;
  comm::tell_end(timers);
  now_ += 7;
  work.wait();
  work.wait();
  const auto records = log_->records(true);
  ASSERT_THAT(records, SizeIs(1));
  EXPECT_EQ(records[0].operation, "all_reduce");
  EXPECT_EQ(records[0].group, "world");
  EXPECT_EQ(records[0].bytes, 1024);
  EXPECT_EQ(records[0].count, 1) << "once, however often it is waited for";
  EXPECT_NEAR(records[0].seconds, 0.25, 1e-9);
}

TEST_F(TimedByHand, EndsAtTheWaitOtherwise) {
  issue_waited(CollectiveKind::kBroadcast, 0.5).wait();
  const auto records = log_->records(true);
  ASSERT_THAT(records, SizeIs(1));
  EXPECT_NEAR(records[0].seconds, 0.5, 1e-9);
}

TEST_F(TimedByHand, BeginsWhenTheOneBeforeItHasEnded) {
  std::vector<std::vector<std::shared_ptr<comm::OperationTimer>>> timers;
  std::vector<Work> works;
  for (int i = 0; i < 3; ++i) {
    works.push_back(issue(CollectiveKind::kAllReduce, [&](Collective& collective) {
      timers.push_back(collective.timers);
      return Work();
    }));
  }
  for (const auto& own : timers) {
    now_ += 0.5;
    comm::tell_end(own);
  }
  const auto records = log_->records(true);
  ASSERT_THAT(records, SizeIs(1));
  EXPECT_EQ(records[0].count, 3);
  EXPECT_NEAR(records[0].seconds, 1.5, 1e-9) << "not 0.5 + 1 + 1.5: two of them waited for their turn";
}

TEST_F(TimedByHand, SizesAreRecordsOfTheirOwn) {
  issue_waited(CollectiveKind::kAllReduce, 1, 10).wait();
  issue_waited(CollectiveKind::kAllReduce, 1, 20).wait();
  issue_waited(CollectiveKind::kAllReduce, 1, 20, "bucket 3").wait();
  const auto records = log_->records(true);
  ASSERT_THAT(records, SizeIs(2)) << "labels tell nothing apart";
  EXPECT_EQ(records[0].count, 1);
  EXPECT_EQ(records[1].count, 2);
}

TEST_F(TimedByHand, TooManySizesShareARecord) {
  constexpr auto kMore = static_cast<int64_t>(CommsLog::kMostSizes) + 100;
  for (int64_t elements = 1; elements <= kMore; ++elements) {
    issue_waited(CollectiveKind::kAllReduce, 1, elements).wait();
  }
  int64_t others = 0;
  const auto records = log_->records(true);
  for (const CommsRecord& record : records) others += record.bytes == kOtherSizes ? record.count : 0;
  EXPECT_EQ(others, 100);
  EXPECT_THAT(records, SizeIs(CommsLog::kMostSizes + 1));
}

TEST_F(TimedByHand, DebugTellsLabelsApart) {
  log_with({.operations = all_operations(), .with_labels = true});
  issue_waited(CollectiveKind::kAllReduce, 1, 20, "bucket 3").wait();
  const auto records = log_->records(true);
  ASSERT_THAT(records, SizeIs(1));
  EXPECT_EQ(records[0].operation, "all_reduce | bucket 3");
}

TEST_F(TimedByHand, OtherOperationsAreLeftAlone) {
  LoggedOperations logged{};
  logged.at(static_cast<size_t>(CollectiveKind::kAllGather)) = true;
  log_with({.operations = logged});
  issue(CollectiveKind::kAllReduce, [](Collective& collective) {
    EXPECT_THAT(collective.timers, IsEmpty());
    return Work();
  });
  issue_waited(CollectiveKind::kAllGather, 1).wait();
  const auto records = log_->records(true);
  ASSERT_THAT(records, SizeIs(1));
  EXPECT_EQ(records[0].operation, "all_gather");
}

TEST_F(TimedByHand, NothingIsTimedInAPauseAndAfterAStop) {
  {
    const CommsLog::Pause pause(*log_);
    issue_waited(CollectiveKind::kAllReduce, 1).wait();
  }
  EXPECT_THAT(log_->records(true), IsEmpty());
  issue_waited(CollectiveKind::kAllReduce, 1).wait();
  log_->stop();
  issue_waited(CollectiveKind::kAllReduce, 1).wait();
  const auto records = log_->records(true);
  ASSERT_THAT(records, SizeIs(1));
  EXPECT_EQ(records[0].count, 1);
}

TEST_F(TimedByHand, WhatFailedIsNotCounted) {
  EXPECT_THROW(issue_waited(CollectiveKind::kAllReduce, -1).wait(), CommError);
  EXPECT_THROW(issue(CollectiveKind::kAllReduce, [](Collective&) -> Work { throw CommError("refused"); }), CommError);
  EXPECT_THAT(log_->records(true), IsEmpty());
}

TEST_F(TimedByHand, VerboseIsALineForEachOperation) {
  log_with({.operations = all_operations(), .verbose = true});
  log::set_level("info");
  ::testing::internal::CaptureStderr();
  issue_waited(CollectiveKind::kAllReduce, 0.001, 262144).wait();
  issue_waited(CollectiveKind::kAllReduce, 0.002, 262144).wait();
  const std::string text = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(text, HasSubstr("rank: 0 | comm op: all_reduce | group: world | time (ms): 1.00 | msg size: 1.00 MiB | "
                              "algbw (Gbps): 16.78 | busbw (Gbps): 8.39"));
  EXPECT_THAT(text, HasSubstr("time (ms): 2.00 | msg size: 1.00 MiB | algbw (Gbps): 8.39 | busbw (Gbps): 4.19"));
}

TEST(WholeBytes, AreOfAllRanksTogether) {
  const at::Tensor small = at::ones({3});
  const at::Tensor large = at::ones({12});
  const auto bytes = [](const Collective& c) { return whole_bytes(c, 4); };
  EXPECT_EQ(bytes({.kind = CollectiveKind::kAllReduce, .input = small, .output = small}), 12);
  EXPECT_EQ(bytes({.kind = CollectiveKind::kAllGather, .input = small, .output = large}), 48);
  EXPECT_EQ(bytes({.kind = CollectiveKind::kReduceScatter, .input = large, .output = small}), 48);
  EXPECT_EQ(bytes({.kind = CollectiveKind::kGather, .input = small}), 48) << "off the root too";
  EXPECT_EQ(bytes({.kind = CollectiveKind::kScatter, .output = small}), 48);
  EXPECT_EQ(bytes({.kind = CollectiveKind::kRecv, .output = small}), 12);
  EXPECT_EQ(bytes({.kind = CollectiveKind::kBarrier}), 0);
}

std::shared_ptr<CommsLog> attach(comm::Communicator& world, CommsLog::Clock clock = monotonic_seconds) {
  auto log = std::make_shared<CommsLog>(CommsLogOptions{.rank = world.rank(), .operations = all_operations()},
                                        std::move(clock));
  std::vector<int> ranks;
  for (int rank = 0; rank < world.size(); ++rank) ranks.push_back(rank);
  world.observe_with(log->observer_of(std::move(ranks)));
  return log;
}

int64_t count_of(const std::vector<CommsRecord>& records, const std::string& operation) {
  int64_t count = 0;
  for (const CommsRecord& record : records) count += record.operation == operation ? record.count : 0;
  return count;
}

// Over shared memory, whose thread says when an operation has ended.
TEST(CommsLog, CountsOperationsThatNobodyHasWaitedForYet) {
  test::run_ranks(2, [](comm::Communicator& world) {
    const auto log = attach(world);
    const at::Tensor tensor = at::ones({100});
    const Work first = world.all_reduce(tensor);
    const Work second = world.all_reduce(tensor);
    world.barrier();  // behind them
    EXPECT_EQ(count_of(log->records(true), "all_reduce"), 2);
    first.wait();
    second.wait();
    world.all_reduce(tensor);  // its Work goes at once
    world.barrier();
    const auto records = log->records(true);
    EXPECT_EQ(count_of(records, "all_reduce"), 3);
    EXPECT_EQ(count_of(records, "barrier"), 2);
    for (const CommsRecord& record : records) EXPECT_GE(record.seconds, 0);
  });
}

TEST(CommsLog, SeesGroupsAndMessages) {
  test::run_ranks(3, [](comm::Communicator& world) {
    const auto log = attach(world);
    const auto pair = world.new_group({0, 2}, "pair");
    EXPECT_EQ(log->sees("pair"), world.rank() != 1);
    const at::Tensor tensor = at::ones({4});
    if (!pair) return;
    if (pair->rank() == 0) {
      pair->send(tensor, 1);
    } else {
      pair->recv(tensor, 0);
    }
    pair->barrier();
    const auto records = log->records(true);
    EXPECT_EQ(count_of(records, pair->rank() == 0 ? "send" : "recv"), 1);
    for (const CommsRecord& record : records) {
      EXPECT_EQ(record.group, "pair");
      EXPECT_EQ(record.ranks, (std::vector<int>{0, 2}));
    }
  });
}

// Rank 1 launches after rank 0, and ten seconds later on the clock that both have.
TEST(CommsLog, ARankThatComesLateIsTheOneThatOthersWaitedFor) {
  std::atomic<double> now = 0;
  std::vector<std::vector<CommsRecord>> of_ranks(2);
  test::run_ranks(2, [&](comm::Communicator& world) {
    const auto log = attach(world, [&] { return now.load(); });
    const at::Tensor token = at::ones({1});
    if (world.rank() == 1) {
      world.recv(token, 0);
      now = 10;
    }
    const Work work = world.all_reduce(at::ones({8}));
    if (world.rank() == 0) world.send(token, 1);
    work.wait();
    of_ranks[static_cast<size_t>(world.rank())] = log->records(true);
  });
  const auto found = compare_ranks(of_ranks);
  ASSERT_THAT(found, SizeIs(1)) << "messages are not compared";
  EXPECT_EQ(found[0].operation, "all_reduce");
  EXPECT_DOUBLE_EQ(found[0].communication_seconds, 0);
  EXPECT_DOUBLE_EQ(found[0].waited_seconds.at(0), 10);
  EXPECT_DOUBLE_EQ(found[0].waited_seconds.at(1), 0);
}

}  // namespace
}  // namespace ds::profiling
