// Several ranks on one GPU, as processes joined by gloo; and one rank on NCCL.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <vector>

#include "comm/cuda_plugin.h"
#include "comm/factory.h"
#include "tests/comm/reduction_reference.h"
#include "tests/gpu/device_run.h"
#include "tests/support/process_ranks.h"

namespace ds::engine {
namespace {

using comm::ReduceOp;
using ds::testing::ProcessRank;
using nlohmann::ordered_json;
using test::rank_values;
using test::reduced_values;
using test::tested_device;

std::shared_ptr<comm::Communicator> gloo_ranks(const ProcessRank& ranks) {
  return comm::make_communicator(ranks.meet(std::chrono::seconds(60)), tested_device(), comm::Backend::kGloo);
}

at::Tensor there(const at::Tensor& tensor) { return tensor.to(tested_device()); }

// Every operation on tensors of the device against the reference on the CPU.
void expect_every_collective(comm::Communicator& ranks) {
  const int world = ranks.size();
  const int rank = ranks.rank();
  for (const int64_t n : {int64_t{1}, int64_t{1000}, int64_t{150001}}) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kInt}) {
      SCOPED_TRACE(::testing::Message() << n << " elements " << dtype);
      const at::Tensor own = rank_values(n * world, dtype, rank);
      const at::Tensor sum = reduced_values(world, n * world, dtype, ReduceOp::kSum);

      at::Tensor tensor = there(own).clone();
      ranks.all_reduce(tensor).wait();
      EXPECT_EQ(tensor.device(), tested_device());
      EXPECT_TRUE(at::equal(tensor.cpu(), sum));

      at::Tensor part = torch::zeros({n}, tensor.options());
      ranks.reduce_scatter(part, there(own)).wait();
      EXPECT_TRUE(at::equal(part.cpu(), sum.narrow(0, n * rank, n)));

      tensor.zero_();
      ranks.all_gather(tensor, part).wait();
      EXPECT_TRUE(at::equal(tensor.cpu(), sum));

      part = there(rank_values(n, dtype, rank)).clone();
      ranks.broadcast(part, world - 1).wait();
      EXPECT_TRUE(at::equal(part.cpu(), rank_values(n, dtype, world - 1)));
    }
  }
  at::Tensor output = there(torch::zeros({world * 3}, at::kLong));
  ranks.all_to_all(output, there(torch::full({world * 3}, rank, at::kLong))).wait();
  EXPECT_TRUE(at::equal(output.cpu(), torch::arange(world).repeat_interleave(3)));

  at::Tensor got = there(torch::zeros({1001}));
  const comm::Work sent = ranks.isend(there(rank_values(1001, at::kFloat, rank)), (rank + 1) % world);
  ranks.recv(got, (rank + world - 1) % world);
  sent.wait();
  EXPECT_TRUE(at::equal(got.cpu(), rank_values(1001, at::kFloat, (rank + world - 1) % world)));
  ranks.barrier();
}

DS_PROCESS_TEST(GpuGloo, CarriesTensorsOfOneGpu, .world_size = 3, .time_limit = std::chrono::seconds(100)) {
  const auto group = gloo_ranks(ranks);
  expect_every_collective(*group);
}

DS_PROCESS_TEST(GpuGloo, RanksOnOneGpuTrainAsOnTheCpu, .world_size = 2, .time_limit = std::chrono::seconds(100)) {
  const auto group = gloo_ranks(ranks);
  for (const char* precision : {"fp32", "bf16"}) {
    for (const int stage : {0, 1, 2, 3}) {
      SCOPED_TRACE(cat("stage ", stage, ' ', precision));
      const ordered_json plain = device_config(stage, precision);
      const DeviceRun expected = train_on(at::kCPU, plain, *group);
      for (const ordered_json& offload : {ordered_json(), on_host()}) {
        if (stage == 0 && !offload.is_null()) continue;
        const DeviceRun found = train_on(tested_device(), with_offload(plain, offload), *group);
        expect_same_losses(found.losses, expected.losses, tolerance_of(precision));
        expect_changed_weights(found);
      }
    }
  }
}

// Loads NCCL. A group of one rank exchanges nothing, so that NCCL's own set-up and operations need a second GPU.
TEST(GpuNccl, OneRankTrains) {
  if (tested_device().is_cpu()) GTEST_SKIP() << "NCCL has no CPU tensors";
  const auto group = comm::cuda_plugin().make_nccl_communicator(
      {.store = c10::make_intrusive<c10d::HashStore>(), .device = tested_device()});
  expect_every_collective(*group);
  const ordered_json config = device_config(2, "fp32");
  const DeviceRun expected = train_on(at::kCPU, config, *group);
  expect_same_losses(train_on(tested_device(), config, *group).losses, expected.losses, tolerance_of("fp32"));
}

}  // namespace
}  // namespace ds::engine
