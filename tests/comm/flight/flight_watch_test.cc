// Ranks as threads that are watched; tests/faults has processes.
#include "comm/flight/flight_watch.h"

#include <ATen/ops/ones.h>
#include <gmock/gmock.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <thread>
#include <vector>

#include "comm/backends/factory.h"
#include "core/check.h"
#include "core/flight_job.h"
#include "tests/comm/flight/flight_logs.h"
#include "tests/support/file_text.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/store_threads.h"

namespace ds::comm::testing {
namespace {

using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using ::testing::UnorderedElementsAre;

constexpr std::chrono::milliseconds kLimit{500};

struct Watched {
  std::shared_ptr<Communicator> world;

  Watched(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, const std::string& folder) {
    const Rendezvous meeting = rendezvous(store, rank, size, std::chrono::seconds(30));
    world = make_communicator(meeting, c10::kCPU, Backend::kGloo);
    watch_flight(meeting, *world, {.stall_limit = kLimit, .entries = 32, .folder = folder});
  }
  // Writes down a collective that has been done, without doing it.
  void pretend(const std::string& label) const {
    FlightRecorder& recorder = world->watch()->recorder();
    recorder.follow(recorder.begin(0, all_reduce_of(4, label)), Work()).wait();
  }
  void reduce(const std::string& label) const { world->all_reduce(at::ones({4}), ReduceOp::kSum, label).wait(); }
};

bool has_file(const std::string& folder, const std::string& name) {
  const std::filesystem::recursive_directory_iterator files(folder);
  return std::any_of(begin(files), end(files), [&](const auto& entry) { return entry.path().filename() == name; });
}

TEST(FlightWatch, NobodyWatchesOneRank) {
  Rendezvous alone;
  alone.ranks.resize(1);
  const auto world = make_communicator(alone, c10::kCPU);
  watch_flight(alone, *world);
  EXPECT_EQ(world->watch(), nullptr);
}

TEST(FlightWatch, ALateRankIsReportedAndTrainingGoesOn) {
  const test::ScratchFolder folder;
  ds::testing::on_store_threads(3, [&](const auto& store, int rank) {
    const Watched job(store, rank, 3, folder / "flight");
    for (int step = 0; step < 3; ++step) {
      if (step == 1 && rank == 2) std::this_thread::sleep_for(3 * kLimit);
      job.reduce("loss");
    }
  });
  EXPECT_TRUE(has_file(folder / "flight", "summary.txt"));
  EXPECT_TRUE(has_file(folder / "flight", "rank2.flight"));
}

// The signal that takes the stack of a late rank ends usleep(), select() and the like, so that it comes at once: it is
// told as it was before.
TEST(FlightWatch, ALateRankThatTheSignalWakesIsReportedAsItWas) {
  const test::ScratchFolder folder;
  ds::testing::on_store_threads(3, [&](const auto& store, int rank) {
    const Watched job(store, rank, 3, folder / "flight");
    job.reduce("before");
    if (rank == 2) ::usleep(std::chrono::microseconds(3 * kLimit).count());
    job.reduce("loss");
    job.reduce("after");
  });
  std::string summary;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder.path())) {
    if (entry.path().filename() == "summary.txt") summary += test::file_text(entry.path());
  }
  EXPECT_THAT(summary, AllOf(HasSubstr("ranks 0 and 1 wait in all_reduce 'loss'"), HasSubstr("rank 2 ("),
                             HasSubstr("has not entered it: it is alive")));
}

TEST(FlightWatch, NothingIsLeftOfAGoodRun) {
  const test::ScratchFolder folder;
  ds::testing::on_store_threads(3, [&](const auto& store, int rank) {
    const Watched job(store, rank, 3, folder / "flight");
    job.reduce("loss");
  });
  EXPECT_TRUE(std::filesystem::is_empty(folder / "flight"));
}

// As steps of SLURM that a rank of ds-launch starts: all inherit DS_FLIGHT_JOB.
TEST(FlightWatch, JobsThatInheritOneNameKeepApart) {
  const test::ScratchFolder folder;
  ASSERT_EQ(setenv(kFlightJobVariable, "inherited", 1), 0);
  ds::testing::on_store_threads(2, [&](const auto& store, int rank) {
    std::vector<Watched> jobs;
    for (const char* name : {"first", "second", "third"}) {
      jobs.emplace_back(c10::make_intrusive<c10d::PrefixStore>(name, store), rank, 2, folder / "flight");
    }
    for (const Watched& job : jobs) job.reduce("loss");
    if (rank != 0) return;
    std::vector<std::string> names;
    for (const auto& job : std::filesystem::directory_iterator(folder / "flight")) {
      names.push_back(job.path().filename());
      EXPECT_TRUE(has_file(job.path(), "rank0.flight"));
    }
    EXPECT_THAT(names, UnorderedElementsAre("inherited", EndsWith("-2"), EndsWith("-3")));
  });
  ASSERT_EQ(unsetenv(kFlightJobVariable), 0);
  EXPECT_TRUE(std::filesystem::is_empty(folder / "flight"));
}

// Of an earlier start that failed, with more ranks than this one.
TEST(FlightWatch, RecordsOfAnEarlierStartAreLeftAlone) {
  const test::ScratchFolder folder;
  folder.write("flight/named/rank5.flight", "left over");
  ASSERT_EQ(setenv(kFlightJobVariable, "named", 1), 0);
  ds::testing::on_store_threads(2, [&](const auto& store, int rank) {
    const Watched job(store, rank, 2, folder / "flight");
    job.reduce("loss");
    if (rank == 0) EXPECT_FALSE(has_file(folder / "flight/named", "rank0.flight"));
  });
  ASSERT_EQ(unsetenv(kFlightJobVariable), 0);
  EXPECT_TRUE(has_file(folder / "flight/named", "rank5.flight"));
}

// The ranks that stay do not wait for it.
TEST(FlightWatch, AFirstRankThatEndedInGoodOrderIsNotToBlame) {
  const test::ScratchFolder folder;
  ds::testing::on_store_threads(3, [&](const auto& store, int rank) {
    const Watched job(store, rank, 3, folder / "flight");
    const auto pair = job.world->new_group({1, 2}, "pair");
    job.reduce("loss");
    if (rank == 0) return;
    for (int step = 0; step < 2; ++step) {
      if (step == 0 && rank == 2) std::this_thread::sleep_for(4 * kLimit);
      pair->all_reduce(at::ones({4}), ReduceOp::kSum, "export").wait();
    }
  });
}

// Nothing hangs: every sum is of two different things, as it would be over NCCL.
TEST(FlightWatch, AnotherSequenceEndsAllRanks) {
  const test::ScratchFolder folder;
  ds::testing::on_store_threads(3, [&](const auto& store, int rank) {
    const Watched job(store, rank, 3, folder / "flight");
    std::string why;
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (why.empty() && std::chrono::steady_clock::now() < end) {
      try {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        job.pretend(rank == 1 ? "gradients of bucket 1" : "gradients of bucket 0");
      } catch (const CommError& error) {
        why = error.what();
      }
    }
    EXPECT_THAT(why, AllOf(HasSubstr("issued different collectives"), HasSubstr("group world")));
  });
}

// The limit of a stall, 60 seconds, is for ranks that may still come.
TEST(FlightWatch, RanksThatWaitInTwoGroupsForEachOtherEndAtOnce) {
  const test::ScratchFolder folder;
  ds::testing::on_store_threads(2, [&](const auto& store, int rank) {
    const Rendezvous meeting = rendezvous(store, rank, 2, std::chrono::seconds(30));
    const auto world = make_communicator(meeting, c10::kCPU, Backend::kShm);
    watch_flight(meeting, *world, {.entries = 32, .folder = folder / "flight"});
    const auto parameters = world->new_group({0, 1}, "parameters");
    world->note_phase(rank == 0 ? "save_checkpoint" : "backward", 3);
    Communicator& own = rank == 0 ? *world : *parameters;
    EXPECT_THAT([&] { own.all_reduce(at::ones({4}), ReduceOp::kSum, "bucket 0").wait(); },
                ThrowsMessage<CommError>(AllOf(HasSubstr("ranks wait for each other"),
                                               HasSubstr("rank 0 is in save_checkpoint(), rank 1 in backward()"))));
  });
}

}  // namespace
}  // namespace ds::comm::testing
