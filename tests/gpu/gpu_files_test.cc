// aio.use_gds: parameters in files, read straight into the device's memory.
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "comm/shared_memory/thread_group.h"
#include "core/check.h"
#include "core/text.h"
#include "dsengine/errors.h"
#include "tests/gpu/device_run.h"
#include "tests/gpu/nccl_ranks.h"
#include "tests/simulated_gpu/reports.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

ordered_json in_files(const std::string& precision, bool direct, const ordered_json& parameters = {{"max_in_cpu", 0}},
                      const ordered_json& optimizer = on_host()) {
  ordered_json config = with_offload(device_config(3, precision), optimizer, on_disk(parameters));
  config["aio"]["use_gds"] = direct;
  return config;
}

// What goes wrong on the simulated GPU, until the end of the scope.
class Mishap {
 public:
  explicit Mishap(const char* what) { ::setenv("DS_SIMULATED_CUFILE", what, 1); }
  ~Mishap() { ::unsetenv("DS_SIMULATED_CUFILE"); }
  Mishap(const Mishap&) = delete;
  Mishap& operator=(const Mishap&) = delete;
};

int64_t take_reads() {
  static const auto take = reinterpret_cast<decltype(&ds_simulated_gpu_file_reads)>(
      ::dlsym(::dlopen(std::getenv("DS_CUDA_LIBRARY"), RTLD_NOW), "ds_simulated_gpu_file_reads"));
  return take();
}

// Empty: files can be read so here. A real GPU need have neither cuFile nor a disk that it reads.
std::string why_not() {
  const auto alone = comm::ThreadGroup(1).communicator(0);
  try {
    train_on(test::tested_device(), in_files("fp32", /*direct=*/true), *alone);
  } catch (const ConfigError& error) {
    const std::string reason = error.what();
    if (reason.find("aio.use_gds: ") == std::string::npos) throw;
    return reason;
  }
  return "";
}

class GpuFiles : public ::testing::Test {
 protected:
  void SetUp() override {
    if (test::tested_device().is_cpu()) GTEST_SKIP() << "needs a GPU, found the CPU";
    if (test::device_is_simulated()) return;
    static const std::string why = why_not();
    if (!why.empty()) GTEST_SKIP() << why;
  }
};

struct FilesCell {
  std::string precision;
  ordered_json optimizer;
  ordered_json parameters;
  int world = 1;
};

TEST_F(GpuFiles, GiveTheSameBits) {
  const ordered_json all = {{"max_in_cpu", 0}};
  const std::vector<FilesCell> cells = {
      {"fp32", {}, all},
      {"fp32", on_host(), {{"max_in_cpu", 0}, {"buffer_count", 2}}},
      {"bf16", on_disk(), all},
      {"bf16", on_host(), {{"max_in_cpu", 100}}},  // the first slice stays on the host
      {"fp16", on_host(), all},
      {"fp32", on_host(), all, 2},
      {"bf16", {}, {{"max_in_cpu", 0}, {"buffer_count", 2}}, 2}};
  for (const FilesCell& cell : cells) {
    if (cell.world > 1 && !test::missing_gpus(cell.world).empty()) continue;
    SCOPED_TRACE(cat(cell.world, " ranks, ", cell.precision, ", optimizer ", cell.optimizer.dump(), ", parameters ",
                     cell.parameters.dump()));
    test::on_devices(cell.world, [&](comm::Communicator& ranks, at::Device device) {
      const auto run = [&](bool direct) {
        return train_on(device, in_files(cell.precision, direct, cell.parameters, cell.optimizer), ranks);
      };
      const DeviceRun host = run(false);
      const bool counts = test::device_is_simulated() && cell.world == 1;
      if (counts) take_reads();
      const DeviceRun direct = run(true);
      if (counts) EXPECT_GT(take_reads(), kDeviceRunSteps);
      EXPECT_EQ(direct.losses, host.losses);
      EXPECT_EQ(largest_difference(direct.weights, host.weights), 0);
    });
  }
}

TEST_F(GpuFiles, ReadsThatBringHalfGoOn) {
  if (!test::device_is_simulated()) GTEST_SKIP() << "the simulated GPU can be told to";
  const auto alone = comm::ThreadGroup(1).communicator(0);
  struct Run {
    std::vector<double> losses;
    int64_t reads = 0;
  };
  const auto run = [&] {  // with a slice of four blocks
    torch::manual_seed(3);
    torch::nn::Linear model(64, 64);
    const auto engine = initialize({.model = model.ptr(),
                                    .config = in_files("fp32", true),
                                    .communicator = borrowed(*alone),
                                    .device = test::tested_device().str()})
                            .engine;
    const at::Tensor input = torch::linspace(-1, 1, 64).to(engine->device());
    Run result;
    take_reads();
    for (int64_t micro = 0; micro < 3 * engine->gradient_accumulation_steps(); ++micro) {
      const at::Tensor loss = model->forward(input).pow(2).mean();
      engine->backward(loss);
      engine->step();
      result.losses.push_back(loss.item<double>());
    }
    result.reads = take_reads();
    return result;
  };
  const Run whole = run();
  const Mishap mishap("half");
  const Run halves = run();
  EXPECT_EQ(halves.losses, whole.losses);
  EXPECT_GT(halves.reads, whole.reads);
  EXPECT_LT(halves.losses.back(), halves.losses.front());
}

TEST_F(GpuFiles, NothingInFilesIsSaid) {
  const auto alone = comm::ThreadGroup(1).communicator(0);
  SmallNet model;
  ::testing::internal::CaptureStderr();
  initialize({.model = model.ptr(),
              .config = in_files("fp32", true, ordered_json::object()),
              .communicator = borrowed(*alone),
              .device = test::tested_device().str()});
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              AllOf(HasSubstr("aio.use_gds: nothing to read"), HasSubstr("max_in_cpu")));
}

TEST_F(GpuFiles, FailuresAreErrorsThatSayWhere) {
  if (!test::device_is_simulated()) GTEST_SKIP() << "the simulated GPU can be told to";
  const auto alone = comm::ThreadGroup(1).communicator(0);
  for (const auto& [what, text] : {std::pair("fails", "Input/output error"), {"ends", "the file ends there"}}) {
    SCOPED_TRACE(what);
    SmallNet model;
    const auto engine = initialize({.model = model.ptr(),
                                    .config = in_files("fp32", true),
                                    .communicator = borrowed(*alone),
                                    .device = test::tested_device().str()})
                            .engine;
    const auto make_step = [&] {
      for (int64_t micro = 0; micro < engine->gradient_accumulation_steps(); ++micro) {
        engine->backward(model->loss(sample(micro, 0).to(engine->device())));
        engine->step();
      }
    };
    make_step();
    const Mishap mishap(what);
    std::string message;
    try {
      make_step();
    } catch (const std::exception& error) {  // in forward LibTorch's, by whom it is told there
      message = error.what();
    }
    EXPECT_THAT(message, AllOf(HasSubstr("parameters"), HasSubstr(" bytes from offset "), HasSubstr(text)));
  }
}

TEST_F(GpuFiles, WhatIsMissingIsNamed) {
  const auto alone = comm::ThreadGroup(1).communicator(0);
  const auto starts_on = [&](const std::string& device) {
    SmallNet model;
    initialize(
        {.model = model.ptr(), .config = in_files("fp32", true), .communicator = borrowed(*alone), .device = device});
  };
  EXPECT_THAT([&] { starts_on("cpu"); },
              ThrowsMessage<ConfigError>(AllOf(HasSubstr("aio.use_gds: expected a GPU"), HasSubstr("found the CPU"))));
  if (!test::device_is_simulated()) return;
  {
    const Mishap mishap("missing");
    EXPECT_THAT([&] { starts_on("cuda:0"); },
                ThrowsMessage<ConfigError>(
                    AllOf(HasSubstr("aio.use_gds: "), HasSubstr("no library cuFile"), HasSubstr("use false"))));
  }
  const Mishap mishap("refuses");
  EXPECT_THAT([&] { starts_on("cuda:0"); },
              ThrowsMessage<ConfigError>(AllOf(HasSubstr("parameters"), HasSubstr("on this file system"))));
}

}  // namespace
}  // namespace ds::engine
