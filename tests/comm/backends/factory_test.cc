// Which communicator a job gets, and that it carries data.
#include "comm/backends/factory.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include "comm/backends/cuda_plugin.h"
#include "core/check.h"
#include "tests/comm/reduction_reference.h"
#include "tests/support/store_threads.h"
#include "tests/support/thrown.h"

namespace ds::comm {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr auto kCpu = c10::kCPU;
constexpr auto kCuda = c10::kCUDA;

TEST(CudaPlugin, IsLeftAloneWhereNoGpuIsShown) {
  for (const char* none : {"", " ", "-1", " -1", "-1,0"}) EXPECT_TRUE(shows_no_gpu(none)) << none;
  for (const char* some : {"0", "1,-1", " 0", "GPU-a1aa"}) EXPECT_FALSE(shows_no_gpu(some)) << some;
  EXPECT_FALSE(shows_no_gpu(nullptr));
}

// Ranks numbered host after host: {2, 2} are four ranks on two hosts.
Rendezvous meeting_of(const std::vector<int>& ranks_per_host) {
  Rendezvous meeting{.world_size = 0};
  for (size_t host = 0; host < ranks_per_host.size(); ++host) {
    for (int i = 0; i < ranks_per_host[host]; ++i) {
      meeting.ranks.push_back({cat("host", host), 100 + meeting.world_size, cat("domain", host), "10.0.0.1"});
      ++meeting.world_size;
    }
  }
  return meeting;
}

Transport transport_of(const std::vector<int>& ranks_per_host, c10::DeviceType device, Backend backend) {
  return choose_backend(meeting_of(ranks_per_host), device, backend).transport;
}

std::string refusal_of(const std::vector<int>& ranks_per_host, c10::DeviceType device, Backend backend) {
  return test::thrown_by<ConfigError>([&] { choose_backend(meeting_of(ranks_per_host), device, backend); },
                                      "not refused");
}

TEST(ParseBackend, EveryNameReadsBack) {
  for (const Backend backend : {Backend::kAuto, Backend::kGloo, Backend::kShm, Backend::kNccl}) {
    EXPECT_EQ(parse_backend(name_of(backend)), backend);
  }
}

TEST(ParseBackend, AnotherNameIsRefusedWithTheKey) {
  for (const char* const name : {"mpi", "NCCL", ""}) {
    try {
      parse_backend(name);
      ADD_FAILURE() << "accepted " << name;
    } catch (const ConfigError& error) {
      EXPECT_THAT(error.what(), AllOf(HasSubstr("communication_backend"), HasSubstr("auto, gloo, shm or nccl"),
                                      HasSubstr(cat("'", name, "'"))));
    }
  }
}

TEST(ChooseBackend, AutoFollowsDeviceAndHosts) {
  EXPECT_EQ(transport_of({1}, kCpu, Backend::kAuto), Transport::kAlone);
  EXPECT_EQ(transport_of({4}, kCpu, Backend::kAuto), Transport::kSharedMemory);
  EXPECT_EQ(transport_of({2, 2}, kCpu, Backend::kAuto), Transport::kHierarchical);
  EXPECT_EQ(transport_of({1}, kCuda, Backend::kAuto), Transport::kAlone);
  EXPECT_EQ(transport_of({2}, kCuda, Backend::kAuto), Transport::kNccl);
  EXPECT_EQ(transport_of({2, 2}, kCuda, Backend::kAuto), Transport::kNccl);
}

TEST(ChooseBackend, AsAsked) {
  EXPECT_EQ(transport_of({4}, kCpu, Backend::kGloo), Transport::kGloo);
  EXPECT_EQ(transport_of({2, 2}, kCpu, Backend::kGloo), Transport::kGloo);
  EXPECT_EQ(transport_of({2}, kCuda, Backend::kGloo), Transport::kGloo);
  EXPECT_EQ(transport_of({2}, kCpu, Backend::kShm), Transport::kSharedMemory);
  EXPECT_EQ(transport_of({2}, kCuda, Backend::kNccl), Transport::kNccl);
  EXPECT_EQ(transport_of({1}, kCuda, Backend::kNccl), Transport::kNccl);
}

TEST(ChooseBackend, TheReasonSaysWhy) {
  const auto reason = [](const std::vector<int>& hosts, Backend backend) {
    return choose_backend(meeting_of(hosts), kCpu, backend).reason;
  };
  EXPECT_EQ(reason({4}, Backend::kAuto), "shm: CPU tensors, all 4 ranks on one host");
  EXPECT_EQ(reason({4}, Backend::kGloo), "gloo, as asked: all 4 ranks on one host");
  EXPECT_EQ(reason({2, 2}, Backend::kAuto),
            "shm inside each host and gloo between them: CPU tensors, 4 ranks on 2 hosts");
  EXPECT_EQ(reason({1, 1}, Backend::kAuto), "gloo: CPU tensors, 2 ranks on 2 hosts, one on each");
  EXPECT_THAT(reason({2, 1}, Backend::kAuto), AllOf(HasSubstr("gloo: "), HasSubstr("host0 (2), host1 (1)")));
}

TEST(ChooseBackend, RefusalsNameTheKeyAndWhatWasFound) {
  EXPECT_THAT(refusal_of({2}, kCpu, Backend::kNccl),
              AllOf(HasSubstr("communication_backend: nccl"), HasSubstr("device is cpu"), HasSubstr("Use auto")));
  EXPECT_THAT(refusal_of({1}, kCpu, Backend::kNccl), HasSubstr("communication_backend: nccl"));
  EXPECT_THAT(refusal_of({2}, kCuda, Backend::kShm),
              AllOf(HasSubstr("communication_backend: shm"), HasSubstr("cuda"), HasSubstr("Use auto")));
  EXPECT_THAT(refusal_of({2, 1}, kCpu, Backend::kShm),
              AllOf(HasSubstr("communication_backend: shm"), HasSubstr("host0 (2), host1 (1)"), HasSubstr("Use auto")));
  EXPECT_THAT(refusal_of({2}, c10::kXPU, Backend::kAuto), HasSubstr("expected device cpu or cuda, found xpu"));
}

// Sums of integers and a gather, on the whole world and on a group of its first two ranks.
void exchange(Communicator& communicator) {
  const int world = communicator.size();
  const int rank = communicator.rank();
  at::Tensor sum = test::rank_values(1001, at::kInt, rank);
  communicator.all_reduce(sum).wait();
  EXPECT_TRUE(torch::equal(sum, test::reduced_values(world, 1001, at::kInt, ReduceOp::kSum)));
  at::Tensor all = torch::zeros({world * 3}, at::kLong);
  communicator.all_gather(all, torch::full({3}, rank, at::kLong)).wait();
  EXPECT_TRUE(torch::equal(all, torch::arange(world).repeat_interleave(3)));
  const auto pair = communicator.new_group({0, 1}, "pair");
  EXPECT_EQ(pair != nullptr, rank < 2);
  if (pair) {
    at::Tensor both = torch::full({2}, static_cast<float>(rank + 1));
    pair->all_reduce(both).wait();
    EXPECT_TRUE(torch::equal(both, torch::full({2}, 3.0F)));
  }
  communicator.barrier();
}

void exchange_on_threads(Backend backend, const std::vector<std::string>& domains) {
  const int world = static_cast<int>(domains.size());
  ds::testing::on_store_threads(world, [&](const auto& store, int rank) {
    Rendezvous meeting = rendezvous(store, rank, world, std::chrono::seconds(30));
    for (int r = 0; r < world; ++r) {
      meeting.ranks[r].domain = domains[r];
      meeting.ranks[r].address = "127.0.0.1";
    }
    const auto communicator = make_communicator(meeting, c10::Device(kCpu), backend);
    ASSERT_EQ(communicator->size(), world);
    EXPECT_EQ(communicator->rank(), rank);
    EXPECT_EQ(communicator->name(), "world");
    exchange(*communicator);
  });
}

TEST(MakeCommunicator, SharedMemory) { exchange_on_threads(Backend::kAuto, {"a", "a", "a"}); }
TEST(MakeCommunicator, Gloo) { exchange_on_threads(Backend::kGloo, {"a", "a", "a"}); }
TEST(MakeCommunicator, TwoHosts) { exchange_on_threads(Backend::kAuto, {"a", "a", "b", "b"}); }
TEST(MakeCommunicator, UnevenHosts) { exchange_on_threads(Backend::kAuto, {"a", "a", "b"}); }

TEST(MakeCommunicator, AloneNeedsNoStore) {
  const auto communicator = make_communicator(Rendezvous{.ranks = {{"here", 1, "here", ""}}}, c10::Device(kCpu));
  EXPECT_EQ(communicator->size(), 1);
  at::Tensor tensor = torch::full({3}, 5.0F);
  communicator->all_reduce(tensor, ReduceOp::kAvg).wait();
  EXPECT_TRUE(torch::equal(tensor, torch::full({3}, 5.0F)));
}

TEST(MakeCommunicator, TheTimeLimitHolds) {
  ds::testing::on_store_threads(2, [](const auto& store, int rank) {
    const Rendezvous meeting = rendezvous(store, rank, 2, std::chrono::seconds(30));
    const auto communicator =
        make_communicator(meeting, c10::Device(kCpu), Backend::kAuto, std::chrono::milliseconds(300));
    communicator->barrier();
    static std::atomic<bool> done{false};
    if (rank == 1) {
      done.wait(false);  // alive, and not taking part
      return;
    }
    EXPECT_THROW(communicator->all_reduce(torch::ones({2})).wait(), CommError);
    done = true;
    done.notify_all();
  });
}

TEST(MakeCommunicator, NcclForCpuTensorsIsRefused) {
  try {
    make_communicator(meeting_of({2}), c10::Device(kCpu), Backend::kNccl);
    FAIL() << "expected ConfigError";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("communication_backend: nccl"), HasSubstr("device is cpu")));
  }
}

TEST(CudaPlugin, AMissingLibrarySaysHowToBuildIt) {
  try {
    open_cuda_plugin({"/nowhere/libdsengine_cuda.so", "libdsengine_cuda_of_nobody.so"});
    FAIL() << "expected ConfigError";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("libdsengine_cuda.so"), HasSubstr("/nowhere/libdsengine_cuda.so"),
                                    HasSubstr("libdsengine_cuda_of_nobody.so"), HasSubstr("No such file"),
                                    HasSubstr("cmake --preset cuda"), HasSubstr("run on the CPU")));
  }
}

TEST(CudaPlugin, AnotherLibraryIsRefusedByItsVersion) {
  try {
    open_cuda_plugin({"libm.so.6"});
    FAIL() << "expected ConfigError";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("expected version 3, found 0"), HasSubstr("one source tree")));
  }
}

}  // namespace
}  // namespace ds::comm
