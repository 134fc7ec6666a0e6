// Several ranks on one GPU, as processes joined by gloo; and one rank on NCCL.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <vector>

#include "comm/backends/cuda_plugin.h"
#include "comm/backends/factory.h"
#include "tests/gpu/collective_checks.h"
#include "tests/gpu/device_run.h"
#include "tests/support/process_ranks.h"

namespace ds::engine {
namespace {

using ds::testing::ProcessRank;
using nlohmann::ordered_json;
using test::tested_device;

std::shared_ptr<comm::Communicator> gloo_ranks(const ProcessRank& ranks) {
  return comm::make_communicator(ranks.meet(std::chrono::seconds(60)), tested_device(), comm::Backend::kGloo);
}

DS_PROCESS_TEST(GpuGloo, CarriesTensorsOfOneGpu, .world_size = 3, .time_limit = std::chrono::seconds(100)) {
  const auto group = gloo_ranks(ranks);
  test::expect_every_collective(*group, tested_device());
}

DS_PROCESS_TEST(GpuGloo, RanksOnOneGpuTrainAsOnTheCpu, .world_size = 2, .time_limit = std::chrono::seconds(100)) {
  const auto group = gloo_ranks(ranks);
  for (const char* precision : {"fp32", "bf16"}) {
    for (const int stage : {0, 1, 2, 3}) {
      SCOPED_TRACE(cat("stage ", stage, ' ', precision));
      ordered_json plain = device_config(stage, precision);
      plain["check_replicas"] = 1;
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
  test::expect_every_collective(*group, tested_device());
  const ordered_json config = device_config(2, "fp32");
  const DeviceRun expected = train_on(at::kCPU, config, *group);
  expect_same_losses(train_on(tested_device(), config, *group).losses, expected.losses, tolerance_of("fp32"));
}

}  // namespace
}  // namespace ds::engine
