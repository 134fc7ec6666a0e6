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
    return error.what();
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

TEST_F(GpuFiles, GiveTheSameBits) {
  const std::vector<ordered_json> optimizers = {ordered_json(), on_host(), on_disk()};
  for (const int world : {1, 2}) {
    if (world > 1 && !test::missing_gpus(world).empty()) continue;
    for (const std::string precision : {"fp32", "bf16", "fp16"}) {
      for (const ordered_json& optimizer : optimizers) {
        for (const ordered_json& parameters :
             {ordered_json{{"max_in_cpu", 0}}, ordered_json{{"max_in_cpu", 0}, {"buffer_count", 2}},
              ordered_json{{"max_in_cpu", 40}}}) {
          SCOPED_TRACE(
              cat(world, " ranks, ", precision, ", optimizer ", optimizer.dump(), ", parameters ", parameters.dump()));
          test::on_devices(world, [&](comm::Communicator& ranks, at::Device device) {
            const DeviceRun host = train_on(device, in_files(precision, false, parameters, optimizer), ranks);
            if (test::device_is_simulated() && world == 1) take_reads();
            const DeviceRun direct = train_on(device, in_files(precision, true, parameters, optimizer), ranks);
            if (test::device_is_simulated() && world == 1) EXPECT_GT(take_reads(), kDeviceRunSteps);
            EXPECT_EQ(direct.losses, host.losses);
            EXPECT_EQ(largest_difference(direct.weights, host.weights), 0);
          });
        }
      }
    }
  }
}

TEST_F(GpuFiles, ReadsThatBringHalfGoOn) {
  if (!test::device_is_simulated()) GTEST_SKIP() << "the simulated GPU can be told to";
  const auto alone = comm::ThreadGroup(1).communicator(0);
  const DeviceRun whole = train_on(test::tested_device(), in_files("fp32", true), *alone);
  const Mishap mishap("half");
  EXPECT_EQ(train_on(test::tested_device(), in_files("fp32", true), *alone).losses, whole.losses);
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
    EXPECT_THAT(make_step, ThrowsMessage<IoError>(
                               AllOf(HasSubstr("parameters"), HasSubstr(" bytes from offset "), HasSubstr(text))));
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
