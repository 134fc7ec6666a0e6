// Ranks as processes of this host: the same collectives, ranks that die, and what is left behind.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>

#include "comm/shared_memory/shared_memory_communicator.h"
#include "core/check.h"
#include "tests/comm/reduction_reference.h"
#include "tests/support/process_ranks.h"

namespace ds::test {
namespace {

using comm::Communicator;
using comm::ReduceOp;
using ds::testing::ProcessRank;
using ::testing::AllOf;
using ::testing::HasSubstr;

std::shared_ptr<Communicator> join(const comm::Rendezvous& meeting) {
  return comm::make_shared_memory_communicator(
      {.store = meeting.store, .rank = meeting.rank, .size = meeting.world_size, .timeout = std::chrono::seconds(30)});
}

// Shared memory of dsengine that still has a name.
std::vector<std::string> left_behind() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    if (entry.path().filename().string().starts_with("dsengine-")) names.push_back(entry.path().filename());
  }
  return names;
}

DS_PROCESS_TEST(SharedMemoryProcesses, CollectivesAndMessages, 3) {
  const auto communicator = join(ranks.meet());
  const int next = (ranks.rank() + 1) % 3;
  const int previous = (ranks.rank() + 2) % 3;
  for (const int64_t n : {0, 1, 1001, 300007}) {
    at::Tensor tensor = rank_values(n, at::kFloat, ranks.rank());
    communicator->all_reduce(tensor, ReduceOp::kAvg).wait();
    EXPECT_TRUE(torch::equal(tensor, reduced_values(3, n, at::kFloat, ReduceOp::kAvg)));
    at::Tensor gathered = torch::zeros({3 * n});
    communicator->all_gather(gathered, rank_values(n, at::kFloat, ranks.rank())).wait();
    EXPECT_TRUE(torch::equal(gathered.narrow(0, previous * n, n), rank_values(n, at::kFloat, previous)));
    const comm::Work sent = communicator->isend(rank_values(n, at::kFloat, ranks.rank(), 1), next);
    at::Tensor got = torch::zeros({n});
    communicator->recv(got, previous);
    sent.wait();
    EXPECT_TRUE(torch::equal(got, rank_values(n, at::kFloat, previous, 1)));
  }
}

DS_PROCESS_TEST(SharedMemoryProcesses, NewGroups, 3) {
  const auto communicator = join(ranks.meet());
  const auto pair = communicator->new_group({0, 2}, "pair");
  ASSERT_EQ(pair != nullptr, ranks.rank() != 1);
  if (pair) {
    at::Tensor tensor = torch::full({5}, float(ranks.rank() + 1));
    pair->all_reduce(tensor).wait();
    EXPECT_TRUE(torch::equal(tensor, torch::full({5}, 4.0F)));
  }
  communicator->barrier();
}

DS_PROCESS_TEST(SharedMemoryProcesses, OnlyTheirOwnUserMayReadTheMemory, 2) {
  const std::string name = cat("/dsengine-test-mode-", getpid());
  const auto region = comm::SharedRegion::create(name, 4096);
  const auto mode = std::filesystem::status("/dev/shm" + name).permissions();
  comm::SharedRegion::remove_name(name);
  EXPECT_EQ(mode, std::filesystem::perms::owner_read | std::filesystem::perms::owner_write);
}

// A rank killed in the middle of an operation: the others hear within seconds, not at the limit of 30 s, who it was.
DS_PROCESS_TEST(SharedMemoryKill, SurvivorsNameTheDeadRank, .world_size = 3, .killed = {1}) {
  const auto communicator = join(ranks.meet());
  at::Tensor tensor = torch::ones({100});
  communicator->all_reduce(tensor, ReduceOp::kSum, "h.0").wait();
  if (ranks.rank() == 1) ProcessRank::kill_self();
  const auto start = std::chrono::steady_clock::now();
  try {
    communicator->all_reduce(tensor, ReduceOp::kSum, "h.1").wait();
    ADD_FAILURE() << "did not throw";
  } catch (const CommError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("all_reduce sum of 100 Float 'h.1'"), HasSubstr("rank 1 (process "),
                                    HasSubstr("'h.0' (#2)"), HasSubstr("died")));
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
}

DS_PROCESS_TEST(SharedMemoryKill, AReceiverHearsOfIt, .world_size = 2, .killed = {1}) {
  const auto communicator = join(ranks.meet());
  communicator->barrier();
  if (ranks.rank() == 1) ProcessRank::kill_self();
  try {
    communicator->recv(torch::zeros({3}), 1);
    ADD_FAILURE() << "did not throw";
  } catch (const CommError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("recv of 3 Float from rank 1"), HasSubstr("died")));
  }
}

DS_PROCESS_TEST(SharedMemoryKill, NothingIsLeftBehind, .world_size = 3, .killed = {0, 1, 2}) {
  const comm::Rendezvous meeting = ranks.meet();
  const auto communicator = join(meeting);
  const auto group = communicator->new_group({0, 1}, "pair");
  communicator->barrier();
  // Rank 0 made both regions; what has no name while its processes live has none when they are gone.
  EXPECT_THAT(left_behind(), ::testing::Not(::testing::Contains(HasSubstr(cat("-", meeting.ranks[0].process, "-")))));
  if (::testing::Test::HasFailure()) return;  // which is not the death that the test expects
  ProcessRank::kill_self();
}

DS_PROCESS_TEST(SharedMemoryStart, RankZeroNamesWhoIsMissing, 3) {
  const comm::Rendezvous meeting = ranks.meet();
  const auto start = [&] {
    comm::make_shared_memory_communicator(
        {.store = meeting.store, .rank = ranks.rank(), .size = 3, .name = "late", .timeout = std::chrono::seconds(1)});
  };
  if (ranks.rank() == 2) return;
  try {
    start();
    ADD_FAILURE() << "did not throw";
  } catch (const CommError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("joining group late"), HasSubstr("rank 2 (has not joined)")));
  }
}

}  // namespace
}  // namespace ds::test
