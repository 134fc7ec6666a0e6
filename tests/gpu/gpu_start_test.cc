// What a program may do before it names a device, and which device it then gets. Each test is a process of its own:
// LibTorch looks for its CUDA library once (Note [A CUDA library that comes too late]).
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <iostream>
#include <string>
#include <vector>

#include "comm/backends/cuda_plugin.h"
#include "comm/job/rank_device.h"
#include "comm/shared_memory/thread_group.h"
#include "core/check.h"
#include "tests/gpu/device_run.h"

namespace ds::engine {
namespace {

constexpr int kRefused = 3;

// Runs `body` in a new process that begins as this one did, with the environment as it is now.
void expect_exit(int code, const std::function<void()>& body, const std::string& said = "") {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto run = [&] {
    try {
      body();
    } catch (const ConfigError& error) {
      std::cerr << error.what() << std::endl;
      std::exit(kRefused);
    }
    std::exit(0);
  };
  EXPECT_EXIT(run(), ::testing::ExitedWithCode(code), said);
}

void set_variable(const char* name, const std::string& value) { ::setenv(name, value.c_str(), 1); }

// GPUs that processes see from now on, simulated or not.
void show_gpus(const char* count, const char* indices) {
  set_variable("DS_SIMULATED_GPUS", count);
  set_variable("CUDA_VISIBLE_DEVICES", indices);
}

struct EarlyUse {
  std::string name;
  std::function<void()> use;
};

std::vector<EarlyUse> early_uses() {
  return {{"Seed", [] { torch::manual_seed(1); }},
          {"Question", [] { EXPECT_TRUE(torch::cuda::is_available()); }},
          {"PinnedMemory", [] { EXPECT_FALSE(torch::ones({1}).is_pinned()); }},
          {"BackwardOnTheCpu", [] { torch::ones({1}, torch::requires_grad()).sum().backward(); }}};
}

class GpuStart : public ::testing::TestWithParam<EarlyUse> {};

INSTANTIATE_TEST_SUITE_P(Before, GpuStart, ::testing::ValuesIn(early_uses()),
                         [](const auto& use) { return use.param.name; });

TEST_P(GpuStart, TrainsAfterwards) {
  expect_exit(0, [] {
    GetParam().use();
    const auto ranks = comm::ThreadGroup(1).communicator(0);
    const DeviceRun run = train_on(test::tested_device(), device_config(2, "bf16"), *ranks);
    if (!std::isfinite(run.losses.back()) || ::testing::Test::HasFailure()) std::exit(1);
  });
}

TEST(GpuStart, ALibraryThatComesTooLateIsRefused) {
  if (!test::device_is_simulated()) GTEST_SKIP() << "where there is a GPU its library is loaded at the start";
  if (std::filesystem::exists("/dev/nvidiactl")) GTEST_SKIP() << "where there is a GPU that one's library is loaded";
  if (std::getenv("DS_TEST_LIBRARY") == nullptr) set_variable("DS_TEST_LIBRARY", std::getenv("DS_CUDA_LIBRARY"));
  const std::string library = std::getenv("DS_TEST_LIBRARY");
  ::unsetenv("DS_CUDA_LIBRARY");
  expect_exit(
      kRefused,
      [] {
        torch::manual_seed(1);
        set_variable("DS_CUDA_LIBRARY", std::getenv("DS_TEST_LIBRARY"));
        comm::cuda_plugin();
      },
      "torch::manual_seed.* come after .*init_distributed");
  expect_exit(0, [] {
    set_variable("DS_CUDA_LIBRARY", std::getenv("DS_TEST_LIBRARY"));
    comm::cuda_plugin();
    torch::manual_seed(1);
    torch::ones({1}, torch::Device(torch::kCUDA, 0));
  });
  set_variable("DS_CUDA_LIBRARY", library);
}

// Slurm gives each task its own GPU, which is the first that it sees.
TEST(GpuStart, ARankThatSeesOneGpuTakesIt) {
  show_gpus("1", "0");
  expect_exit(0, [] {
    for (const int local_rank : {0, 1, 7}) {
      if (device_of_rank("cuda", local_rank) != c10::Device(c10::kCUDA, 0)) std::exit(1);
    }
    if (device_of_rank("cuda:1", 0).index() != 1) std::exit(1);  // the program's word
  });
  ::unsetenv("DS_SIMULATED_GPUS");
  ::unsetenv("CUDA_VISIBLE_DEVICES");
}

TEST(GpuStart, AGpuIsUsedWhereThereIsOne) {
  expect_exit(0, [] {
    for (const char* name : {"", "auto"}) {
      if (device_of_rank(name, 0) != c10::Device(c10::kCUDA, 0)) std::exit(1);
    }
    SmallNet model;
    const auto engine = initialize({.model = model.ptr(), .config = device_config(1, "fp32")}).engine;
    if (engine->device() != c10::Device(c10::kCUDA, 0)) std::exit(2);
    engine->backward(model->loss(sample(0, 0).to(engine->device())));
    // A group that the program has made is for a device of its own.
    SmallNet other;
    const auto ranks = comm::ThreadGroup(1).communicator(0);
    const auto on_cpu =
        initialize({.model = other.ptr(), .config = device_config(1, "fp32"), .communicator = borrowed(*ranks)});
    if (!on_cpu.engine->device().is_cpu()) std::exit(3);
  });
  show_gpus("8", "");
  expect_exit(0, [] {
    if (!device_of_rank("auto", 0).is_cpu()) std::exit(1);
  });
  ::unsetenv("DS_SIMULATED_GPUS");
  ::unsetenv("CUDA_VISIBLE_DEVICES");
}

TEST(GpuStart, AGpuThatCannotBeUsedIsRefusedUnlessTheCpuIsAskedFor) {
  if (!test::device_is_simulated())
    GTEST_SKIP() << "needs a GPU that cannot be used, which only the simulated one can be";
  show_gpus("0", "0");
  expect_exit(
      kRefused, [] { device_of_rank("", 0); },
      "a GPU is visible to this process.*CUDA finds none that it can use: its driver runs CUDA 13.0, which is new "
      "enough.*ask for it: .device = .cpu");
  set_variable("DS_SIMULATED_DRIVER", "12020");
  const std::string too_old = "driver is too old: it runs CUDA 12.2, and this LibTorch needs CUDA 13.0";
  expect_exit(
      kRefused, [] { device_of_rank("", 0); }, "a GPU is visible.*" + too_old + ".*ask for it: .device = .cpu");
  expect_exit(
      kRefused, [] { device_of_rank("cuda", 0); }, ".device: cuda: CUDA finds no GPU.*" + too_old);
  set_variable("DS_SIMULATED_DRIVER", "0");
  expect_exit(
      kRefused, [] { device_of_rank("cuda", 0); }, "there is no NVIDIA driver");
  ::unsetenv("DS_SIMULATED_DRIVER");
  expect_exit(0, [] {
    if (!device_of_rank("cpu", 0).is_cpu()) std::exit(1);
  });
  ::unsetenv("DS_SIMULATED_GPUS");
  ::unsetenv("CUDA_VISIBLE_DEVICES");
  const std::string library = std::getenv("DS_CUDA_LIBRARY");
  set_variable("DS_CUDA_LIBRARY", "/nowhere/libdsengine_cuda.so");
  expect_exit(
      kRefused, [] { device_of_rank("auto", 0); },
      "a GPU is visible to this process.*cannot be loaded .*nowhere.*ask for it: .device = .cpu");
  set_variable("DS_CUDA_LIBRARY", "none");
  expect_exit(0, [] {
    if (!device_of_rank("auto", 0).is_cpu()) std::exit(1);
  });
  set_variable("DS_CUDA_LIBRARY", library);
}

TEST(GpuStart, RanksBeyondTheGpusAreRefused) {
  if (!test::device_is_simulated()) GTEST_SKIP() << "how many GPUs there are is the simulated GPU's to say";
  show_gpus("2", "0,1");
  expect_exit(0, [] {
    if (device_of_rank("cuda", 1).index() != 1) std::exit(1);
  });
  expect_exit(
      kRefused, [] { device_of_rank("cuda", 2); }, "LOCAL_RANK 2 expects 3 GPUs, or one of its own, found 2");
  ::unsetenv("DS_SIMULATED_GPUS");
  ::unsetenv("CUDA_VISIBLE_DEVICES");
}

}  // namespace
}  // namespace ds::engine
