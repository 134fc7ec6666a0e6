// The communicators of a job whose ranks are processes: data, and a rank that is killed.
#include <gmock/gmock.h>
#include <torch/torch.h>

#include <chrono>
#include <thread>

#include "comm/backends/factory.h"
#include "core/check.h"
#include "tests/comm/meeting/launcher_environment.h"
#include "tests/comm/reduction_reference.h"
#include "tests/support/process_ranks.h"

namespace ds::test {
namespace {

using comm::Backend;
using ds::testing::ProcessRank;
using ::testing::AllOf;
using ::testing::HasSubstr;

void exchange(const ProcessRank& ranks, Backend backend) {
  const auto communicator = comm::make_communicator(ranks.meet(), c10::Device(c10::kCPU), backend);
  at::Tensor tensor = rank_values(100003, at::kFloat, ranks.rank());
  communicator->all_reduce(tensor, comm::ReduceOp::kAvg).wait();
  EXPECT_TRUE(torch::equal(tensor, reduced_values(3, 100003, at::kFloat, comm::ReduceOp::kAvg)));
  communicator->barrier();
}

DS_PROCESS_TEST(FactoryProcesses, SharedMemory, 3) { exchange(ranks, Backend::kShm); }
DS_PROCESS_TEST(FactoryProcesses, Gloo, 3) { exchange(ranks, Backend::kGloo); }

// `kill -9` of rank 1 while the others are in a collective with it: they hear within seconds, not at the limit of 30 s,
// who it was, and the group says so again when it is used once more.
DS_PROCESS_TEST(GlooKill, SurvivorsNameTheDeadRank, .world_size = 3, .killed = {1}) {
  const comm::Rendezvous meeting = ranks.meet();
  const auto communicator = comm::make_communicator(meeting, c10::Device(c10::kCPU), Backend::kGloo);
  at::Tensor tensor = torch::ones({4000000});
  communicator->all_reduce(tensor, comm::ReduceOp::kAvg, "h.0").wait();
  const auto start = std::chrono::steady_clock::now();
  if (ranks.rank() == 1) {
    const comm::Work begun = communicator->all_reduce(tensor, comm::ReduceOp::kAvg, "h.1");
    ProcessRank::kill_self();
  }
  try {
    // The first may still end well: rank 1 had begun it.
    for (int i = 1; i < 4; ++i) communicator->all_reduce(tensor, comm::ReduceOp::kAvg, cat("h.", i)).wait();
    ADD_FAILURE() << "did not throw";
  } catch (const CommError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("all_reduce 'h."), HasSubstr("group 'world'"),
                                    HasSubstr(cat("rank ", ranks.rank())), HasSubstr("has most likely ended")));
    EXPECT_THAT(error.what(), HasSubstr(cat("rank 1 (", meeting.descriptions()[1], ")")));
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
  EXPECT_THROW(communicator->barrier(), CommError);
}

// Over TCP rank 0 holds the store: it is named when it dies with it, also where another rank was waited for.
DS_PROCESS_TEST(GlooKill, RankZeroIsNamedWithTheStoreItHeld, .world_size = 3, .killed = {0}) {
  set_launcher_environment(ranks.meet());
  const auto communicator = comm::make_communicator(comm::rendezvous({.timeout = std::chrono::seconds(30)}),
                                                    c10::Device(c10::kCPU), Backend::kGloo);
  at::Tensor tensor = torch::ones({4000000});
  communicator->all_reduce(tensor).wait();
  const auto start = std::chrono::steady_clock::now();
  if (ranks.rank() == 0) ProcessRank::kill_self();
  if (ranks.rank() == 2) std::this_thread::sleep_for(std::chrono::milliseconds(200));  // finds the connection closed
  try {
    for (int i = 0; i < 3; ++i) communicator->all_reduce(tensor).wait();
    ADD_FAILURE() << "did not throw";
  } catch (const CommError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("all_reduce"), HasSubstr("rank 0")));
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
}

// A rank that lives and does not take part: the time limit ends the wait.
DS_PROCESS_TEST(GlooKill, TheTimeLimitEndsTheWaitForALivingRank, .world_size = 2) {
  const comm::Rendezvous meeting = ranks.meet();
  const auto communicator =
      comm::make_communicator(meeting, c10::Device(c10::kCPU), Backend::kGloo, std::chrono::milliseconds(500));
  communicator->barrier();
  if (ranks.rank() == 1) {
    meeting.store->wait({"given up"}, std::chrono::seconds(30));
    return;
  }
  try {
    communicator->all_reduce(torch::ones({10}), comm::ReduceOp::kSum, "h.2").wait();
    ADD_FAILURE() << "did not throw";
  } catch (const CommError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("all_reduce 'h.2'"), HasSubstr("waiting for rank 1"),
                                    HasSubstr("nothing came for 500 ms")));
  }
  meeting.store->set("given up", std::string("yes"));
}

}  // namespace
}  // namespace ds::test
