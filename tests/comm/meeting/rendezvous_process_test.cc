// env:// between processes, as a launcher starts them.
#include <gmock/gmock.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <thread>

#include "comm/meeting/rendezvous.h"
#include "core/check.h"
#include "tests/comm/meeting/launcher_environment.h"
#include "tests/support/process_ranks.h"

namespace ds::test {
namespace {

using ds::testing::ProcessRank;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

DS_PROCESS_TEST(RendezvousProcesses, MeetByTheEnvironment, 3) {
  const comm::Rendezvous file = ranks.meet();
  set_launcher_environment(file);
  const comm::Rendezvous meeting = comm::rendezvous({.timeout = std::chrono::seconds(30)});
  EXPECT_EQ(meeting.rank, ranks.rank());
  EXPECT_EQ(meeting.local_rank, ranks.rank());
  EXPECT_EQ(meeting.local_world_size, 3);
  ASSERT_EQ(meeting.ranks.size(), 3U);
  for (int r = 0; r < 3; ++r) EXPECT_EQ(meeting.ranks[r].process, file.ranks[r].process);
  meeting.store->set(cat("from ", ranks.rank()), std::string("here"));
  meeting.store->wait({"from 0", "from 1", "from 2"}, std::chrono::seconds(30));
  // Rank 0's process holds the store, so it ends last.
  file.store->set(cat("read ", ranks.rank()), std::string("yes"));
  if (ranks.rank() == 0) file.store->wait({"read 1", "read 2"}, std::chrono::seconds(30));
}

DS_PROCESS_TEST(RendezvousProcesses, ARankThatDiedBeforeTheMeetingIsNamed, .world_size = 3, .killed = {2}) {
  const comm::Rendezvous file = ranks.meet();
  if (ranks.rank() == 2) ProcessRank::kill_self();
  set_launcher_environment(file);
  try {
    comm::rendezvous({.timeout = std::chrono::milliseconds(ranks.rank() == 0 ? 3000 : 1000)});
    ADD_FAILURE() << "did not throw";
  } catch (const CommError& error) {
    EXPECT_THAT(error.what(),
                AllOf(HasSubstr("not all of 3 ranks came within"), HasSubstr("missing: rank 2; present: ")));
  }
}

// Rank 0 has the store, and ends while rank 1 still waits for rank 2: the time limit has nothing to do with it.
DS_PROCESS_TEST(RendezvousProcesses, AStoreThatEndsEarlyIsNoTimeLimit, .world_size = 3, .killed = {0}) {
  const comm::Rendezvous file = ranks.meet();
  set_launcher_environment(file);
  if (ranks.rank() == 2) {
    file.store->wait({"told"}, std::chrono::seconds(60));
    return;
  }
  if (ranks.rank() == 0) {
    std::thread([&] {
      file.store->wait({"rank 1 begins"}, std::chrono::seconds(60));
      std::this_thread::sleep_for(std::chrono::milliseconds(500));
      ProcessRank::kill_self();
    }).detach();
    comm::rendezvous({.timeout = std::chrono::seconds(60)});
    return;
  }
  const auto begin = std::chrono::steady_clock::now();
  file.store->set("rank 1 begins", std::string("yes"));
  ::testing::internal::CaptureStderr();
  try {
    comm::rendezvous({.timeout = std::chrono::seconds(60)});
    ADD_FAILURE() << "did not throw";
  } catch (const CommError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("rank 0"), HasSubstr("has most likely ended: look at its log first"),
                                    Not(HasSubstr("60000 ms")), Not(HasSubstr("frame #"))));
  }
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");  // LibTorch's warnings with a stack
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(30));
  file.store->set("told", std::string("yes"));
}

}  // namespace
}  // namespace ds::test
