// env:// between processes, as a launcher starts them.
#include <gmock/gmock.h>
#include <sched.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>
#include <utility>

#include "comm/meeting/rendezvous.h"
#include "comm/meeting/strangers.h"
#include "core/check.h"
#include "tests/comm/meeting/launcher_environment.h"
#include "tests/support/process_ranks.h"
#include "tests/support/thrown.h"

namespace ds::test {
namespace {

using ds::testing::ProcessRank;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::ThrowsMessage;

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

// A network namespace of its own, as sandboxes have: rank 0, which would listen, and rank 1, which would come.
DS_PROCESS_TEST(RendezvousProcesses, ALoopbackThatIsDownIsSaidAtOnce, 2) {
  if (::unshare(CLONE_NEWNET) != 0 && ::unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0)
    GTEST_SKIP() << "this user may not make network namespaces";
  for (const auto& [name, value] :
       {std::pair("RANK", cat(ranks.rank())), std::pair("WORLD_SIZE", std::string("2")),
        std::pair("MASTER_ADDR", std::string("127.0.0.1")), std::pair("MASTER_PORT", std::string("29500"))}) {
    ASSERT_EQ(::setenv(name, value.c_str(), 1), 0);
  }
  EXPECT_THAT(
      [] { comm::rendezvous({.timeout = std::chrono::seconds(5)}); },
      ThrowsMessage<CommError>(AllOf(HasSubstr("127.0.0.1 cannot be reached"), HasSubstr("ip link set lo up"))));
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

std::string refusal(std::chrono::milliseconds timeout) {
  return test::thrown_by<CommError>([&] { comm::rendezvous({.timeout = timeout}); });
}

// Two ranks of a job with a secret, and a process that would like to be one of them.
DS_PROCESS_TEST(RendezvousProcesses, AStrangerIsNotLetIn, 3) {
  const comm::Rendezvous file = ranks.meet();
  set_launcher_environment(file);
  const bool stranger = ranks.rank() == 2;
  ::setenv("WORLD_SIZE", "2", 1);
  ::setenv("LOCAL_WORLD_SIZE", "2", 1);
  if (!stranger) {
    ::setenv("DS_JOB_SECRET", "0123456789abcdef0123456789abcdef", 1);
    if (ranks.rank() == 1)
      file.store->wait({"stranger gone"}, std::chrono::seconds(60));  // its place is free until then
    const comm::Rendezvous meeting = comm::rendezvous({.timeout = std::chrono::seconds(60)});
    EXPECT_TRUE(meeting.has_secret);
    EXPECT_EQ(meeting.ranks[1].process, file.ranks[1].process);
    if (ranks.rank() == 0) {
      auto& outside = *dynamic_cast<c10d::PrefixStore&>(*meeting.store).getUnderlyingStore();
      EXPECT_EQ(comm::take_stranger(outside),
                cat("127.0.0.1 (", file.ranks[2].host_name, ", pid ", file.ranks[2].process, ")"));
      EXPECT_EQ(comm::take_stranger(outside), "");
      file.store->wait({"read"}, std::chrono::seconds(60));
    } else {
      file.store->set("read", std::string("yes"));
    }
    return;
  }
  ::setenv("RANK", "1", 1);
  ::setenv("LOCAL_RANK", "1", 1);
  const auto begin = std::chrono::steady_clock::now();
  ::unsetenv("DS_JOB_SECRET");
  EXPECT_THAT(refusal(std::chrono::seconds(60)),
              AllOf(HasSubstr("has a secret (DS_JOB_SECRET)"), HasSubstr("ds-launch")));
  ::setenv("DS_JOB_SECRET", "an earlier job's secret: a replay", 1);
  EXPECT_THAT(refusal(std::chrono::seconds(60)),
              AllOf(HasSubstr("rank 0 has another DS_JOB_SECRET than this rank"), Not(HasSubstr("replay"))));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(30));
  file.store->set("stranger gone", std::string("yes"));
}

DS_PROCESS_TEST(RendezvousProcesses, ASecretThatRankZeroHasNotIsToldAtOnce, 2) {
  const comm::Rendezvous file = ranks.meet();
  set_launcher_environment(file);
  if (ranks.rank() == 0) {  // nobody ends it, as a launcher would
    ::unsetenv("DS_JOB_SECRET");
    EXPECT_THAT(refusal(std::chrono::seconds(3)),
                AllOf(HasSubstr("not all of 2 ranks came within 3000 ms; missing: rank 1"),
                      HasSubstr(cat("pid ", file.ranks[1].process, ") came, with another DS_JOB_SECRET"))));
    return;
  }
  ::setenv("DS_JOB_SECRET", "0123456789abcdef0123456789abcdef", 1);
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_THAT(refusal(std::chrono::seconds(60)),
              AllOf(HasSubstr("rank 0 has no DS_JOB_SECRET, and this rank has one"), HasSubstr("ds-launch")));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(30));
}

// Rank 1 may come before rank 0 to the store of torchrun's agent, and does not know then that they will not meet.
DS_PROCESS_TEST(RendezvousProcesses, SecretsThatDifferUnderTorchrunAreNamedAtTheLimit, 3) {
  const comm::Rendezvous file = ranks.meet();
  set_launcher_environment(file);
  if (ranks.rank() == 2) {
    c10d::TCPStoreOptions options;
    options.port = static_cast<uint16_t>(std::stoi(std::getenv("MASTER_PORT")));
    options.isServer = true;
    options.waitWorkers = false;
    const c10d::TCPStore agent("127.0.0.1", options);
    file.store->wait({"read 0", "read 1"}, std::chrono::seconds(60));
    return;
  }
  ::setenv("WORLD_SIZE", "2", 1);
  ::setenv("LOCAL_WORLD_SIZE", "2", 1);
  ::setenv("TORCHELASTIC_USE_AGENT_STORE", "True", 1);
  ::setenv("TORCHELASTIC_RESTART_COUNT", "0", 1);
  ::setenv("DS_JOB_SECRET", cat("the secret of node ", ranks.rank()).c_str(), 1);
  if (ranks.rank() == 0) {
    file.store->wait({"rank 1 begins"}, std::chrono::seconds(60));
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    EXPECT_THAT(refusal(std::chrono::seconds(3)), HasSubstr("not all of 2 ranks came within 3000 ms"));
  } else {
    file.store->set("rank 1 begins", std::string("yes"));
    EXPECT_THAT(refusal(std::chrono::seconds(3)), HasSubstr("rank 0 has another DS_JOB_SECRET than this rank"));
  }
  file.store->set(cat("read ", ranks.rank()), std::string("yes"));
}

}  // namespace
}  // namespace ds::test
