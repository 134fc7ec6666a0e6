// The engine on a GPU against the same training on the CPU.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>
#include <string>
#include <vector>

#include "comm/shared_memory/thread_group.h"
#include "core/check.h"
#include "core/text.h"
#include "dsengine/profiling.h"
#include "offload/aio_file.h"
#include "tests/gpu/device_run.h"
#include "tests/gpu/nccl_ranks.h"
#include "tests/support/thread_ranks.h"
#include "tests/support/thrown.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;

struct DeviceCell {
  std::string name;
  int stage;
  std::string precision;
  ordered_json optimizer = {};   // offload_optimizer
  ordered_json parameters = {};  // offload_param
};

std::vector<DeviceCell> device_cells() {
  std::vector<DeviceCell> cells;
  for (const char* precision : {"fp32", "bf16", "fp16"}) {
    for (const int stage : {0, 1, 2, 3}) cells.push_back({cat("Stage", stage, precision), stage, precision});
    for (const int stage : {1, 2, 3}) {
      cells.push_back({cat("OptimizerOnTheHostStage", stage, precision), stage, precision, on_host()});
    }
    const ordered_json early = on_host({{"super_offload", true}});
    cells.push_back({cat("UpdatedInBackwardStage2", precision), 2, precision, early});
    const ordered_json half = on_host({{"ratio", 0.5}});
    cells.push_back({cat("HalfOnTheHostStage2", precision), 2, precision, half});
    cells.push_back({cat("AllOnTheHostStage3", precision), 3, precision, on_host(), on_host()});
    const ordered_json piped = on_disk({{"pipeline_read", true}, {"pipeline_write", true}});
    cells.push_back({cat("OptimizerInAFileStage2", precision), 2, precision, piped});
    const ordered_json in_file = on_disk({{"max_in_cpu", 0}});
    cells.push_back({cat("AllInFilesStage3", precision), 3, precision, on_disk(), in_file});
    const ordered_json few_buffers = on_disk({{"max_in_cpu", 0}, {"buffer_count", 2}});
    cells.push_back({cat("FewBuffersStage3", precision), 3, precision, on_disk(), few_buffers});
  }
  return cells;
}

class GpuTraining : public ::testing::TestWithParam<DeviceCell> {
 protected:
  std::shared_ptr<comm::Communicator> ranks_ = comm::ThreadGroup(1).communicator(0);
};

INSTANTIATE_TEST_SUITE_P(Grid, GpuTraining, ::testing::ValuesIn(device_cells()),
                         [](const auto& cell) { return cell.param.name; });

// Empty: files of this kind can be used here. A machine with a GPU may forbid io_uring or have no disk for direct IO.
std::string why_no_files() {
  const auto folder = on_disk()["nvme_path"].get<std::string>();
  return test::thrown_by<ConfigError>(
      [&] {
        const offload::AioFile probe(folder, "probe", offload::AioFile::alignment(), {}, "the folder of the test");
      },
      "");
}

TEST_P(GpuTraining, DoesWhatTheCpuDoes) {
  const DeviceCell& cell = GetParam();
  const bool in_files = !cell.optimizer.is_null() && cell.optimizer.value("device", "") == "nvme";
  if (const std::string why = in_files ? why_no_files() : ""; !why.empty()) GTEST_SKIP() << why;
  const ordered_json plain = device_config(cell.stage, cell.precision);
  const ordered_json config = with_offload(plain, cell.optimizer, cell.parameters);
  const DeviceRun expected = train_on(at::kCPU, plain, *ranks_);
  const DeviceRun found = train_on(test::tested_device(), config, *ranks_);
  expect_same_losses(found.losses, expected.losses, tolerance_of(cell.precision));
  expect_changed_weights(found);
}

// Each gradient is one update old, on both.
TEST(GpuDelayedUpdate, DoesWhatTheCpuDoes) {
  const auto ranks = comm::ThreadGroup(1).communicator(0);
  const ordered_json late = on_host({{"delayed_update", true}, {"delayed_update_start", 1}});
  const auto compare = [&](int stage, const std::string& precision, const ordered_json& parameters) {
    SCOPED_TRACE(cat("stage ", stage, ", ", precision, ", parameters ", parameters.dump()));
    const ordered_json config = with_offload(device_config(stage, precision), late, parameters);
    const DeviceRun expected = train_on(at::kCPU, config, *ranks);
    const DeviceRun found = train_on(test::tested_device(), config, *ranks);
    expect_same_losses(found.losses, expected.losses, tolerance_of(precision));
    expect_changed_weights(found);
  };
  for (const char* precision : {"fp32", "bf16"}) {
    for (const int stage : {2, 3}) compare(stage, precision, {});
    compare(3, precision, on_host());
  }
}

class GpuStates : public GpuTraining {};

INSTANTIATE_TEST_SUITE_P(Stages, GpuStates,
                         ::testing::ValuesIn(std::vector<DeviceCell>{
                             {"Stage0", 0, "fp32"},
                             {"Stage2", 2, "bf16"},
                             {"Stage3", 3, "bf16"},
                             {"OptimizerOnTheHost", 2, "bf16", on_host()},
                         }),
                         [](const auto& cell) { return cell.param.name; });

TEST_P(GpuStates, LeaveTheDeviceAndReturn) {
  const DeviceCell& cell = GetParam();
  const ordered_json config = with_offload(device_config(cell.stage, cell.precision), cell.optimizer);
  const DeviceRun plain = train_on(test::tested_device(), config, *ranks_);
  const DeviceRun moved = train_on(test::tested_device(), config, *ranks_, [](Engine& engine) {
    engine.offload_states();
    EXPECT_GT(engine.moved_bytes(), 0);
    engine.reload_states();
  });
  expect_same_losses(moved.losses, plain.losses, tolerance_of("fp32"));
  EXPECT_LT(largest_difference(moved.weights, plain.weights), 1e-4);
}

TEST(GpuOverflow, SkipsTheStep) {
  const auto ranks = comm::ThreadGroup(1).communicator(0);
  for (const ordered_json& offload : {ordered_json(), on_host()}) {
    SmallNet model;
    const auto engine = initialize({.model = model.ptr(),
                                    .config = with_offload(device_config(2, "fp16"), offload),
                                    .communicator = borrowed(*ranks),
                                    .device = test::tested_device().str()})
                            .engine;
    const auto step_with = [&](double factor) {
      for (int64_t micro = 0; micro < 2; ++micro) {
        engine->backward(model->loss(sample(micro, 0).to(engine->device())) * factor);
        engine->step();
      }
    };
    const State before = copy_of(engine->fp32_state_dict());
    step_with(std::numeric_limits<float>::infinity());
    EXPECT_FALSE(engine->was_step_applied());
    EXPECT_EQ(largest_difference(copy_of(engine->fp32_state_dict()), before), 0.0);
    step_with(1.0);
    EXPECT_TRUE(engine->was_step_applied());
    EXPECT_GT(largest_difference(copy_of(engine->fp32_state_dict()), before), 0.0);
  }
}

TEST(GpuWholeOptimizers, TrainAsOnTheCpu) {
  if (const std::string why = test::missing_gpus(2); !why.empty()) GTEST_SKIP() << why;
  for (const std::string type : {"Lamb", "Muon"}) {
    for (const int stage : {0, 1, 3}) {
      SCOPED_TRACE(cat(type, ", stage ", stage));
      ordered_json config = device_config(stage, "bf16");
      config["optimizer"] = {{"type", type}, {"params", {{"lr", 0.02}, {"weight_decay", 0.1}}}};
      config["zero_allow_untested_optimizer"] = true;
      std::vector<DeviceRun> expected(2);
      test::run_ranks(2, [&](comm::Communicator& ranks) {
        expected[static_cast<size_t>(ranks.rank())] = train_on(at::kCPU, config, ranks);
      });
      test::on_gpus(2, [&](comm::Communicator& ranks, at::Device device) {
        const DeviceRun found = train_on(device, config, ranks);
        expect_same_losses(found.losses, expected[static_cast<size_t>(ranks.rank())].losses, tolerance_of("bf16"));
        EXPECT_LT(largest_difference(found.weights, expected[0].weights), type == "Muon" ? 0.05 : 0.02);
      });
    }
  }
}

// Where the program clips the norm too, the bounds of single gradients are the device's.
DeviceRun run_clipped(at::Device device, const ordered_json& config, double norm) {
  const auto ranks = comm::ThreadGroup(1).communicator(0);
  SmallNet model;
  const auto engine =
      initialize({.model = model.ptr(), .config = config, .communicator = borrowed(*ranks), .device = device.str()})
          .engine;
  DeviceRun run;
  for (int64_t micro = 0; micro < 16; ++micro) {
    const at::Tensor loss = model->loss(sample(micro, 0).to(device));
    engine->backward(loss);
    if (norm > 0 && micro % 2 == 1) engine->clip_grad_norm_(norm);
    engine->step();
    run.losses.push_back(loss.item<double>());
  }
  run.weights = copy_of(engine->fp32_state_dict());
  return run;
}

TEST(GpuClipByValue, ClipsAsOnTheCpu) {
  for (const double norm : {0.0, 0.5}) {
    for (const char* precision : {"bf16", "fp16"}) {
      SCOPED_TRACE(cat(precision, ", norm clipped to ", norm));
      ordered_json config = device_config(1, precision);
      config["gradient_clipping"] = 0.0;
      config["optimizer"] = {{"type", "SGD"}, {"params", {{"lr", 0.1}}}};  // which the size of a gradient matters to
      config["zero_allow_untested_optimizer"] = true;
      const DeviceRun without = run_clipped(at::kCPU, config, norm);
      config["gradient_clip_by_value"] = 0.05;
      const DeviceRun expected = run_clipped(at::kCPU, config, norm);
      const DeviceRun found = run_clipped(test::tested_device(), config, norm);
      expect_same_losses(found.losses, expected.losses, tolerance_of(precision));
      EXPECT_LT(largest_difference(found.weights, expected.weights), 0.01);
      EXPECT_GT(largest_difference(without.weights, expected.weights), 0.02) << "nothing was clipped";
    }
  }
}

// Operations are those of the CPU, whatever kernels compute them; times are events', modules have none.
TEST(GpuFlops, AreThoseOfTheCpu) {
  const auto ranks = comm::ThreadGroup(1).communicator(0);
  for (const int stage : {0, 3}) {
    nlohmann::ordered_json config = device_config(stage, "bf16");
    config["flops_profiler"] = {{"enabled", true}};
    std::vector<profiling::FlopsProfile> profiles;
    for (const at::Device device : {at::Device(at::kCPU), test::tested_device()}) {
      train_on(device, config, *ranks, [&](Engine& engine) {
        if (engine.global_steps() == 2) profiles.push_back(flops_profile(engine).value());
      });
    }
    ASSERT_EQ(profiles.size(), 2U);
    ASSERT_EQ(profiles[0].modules.size(), profiles[1].modules.size());
    for (size_t i = 0; i < profiles[0].modules.size(); ++i) {
      SCOPED_TRACE(profiles[0].modules[i].name);
      EXPECT_EQ(profiles[1].modules[i].macs, profiles[0].modules[i].macs);
      EXPECT_EQ(profiles[1].modules[i].backward_macs, profiles[0].modules[i].backward_macs);
    }
    EXPECT_NE(profiles[1].text.find("latencies of modules are not measured on a device"), std::string::npos);
  }
}

}  // namespace
}  // namespace ds::engine
