// main() of tests that need a GPU. Without one it says so and ends with 77, which ctest reports as skipped. With one,
// whatever keeps the tests from running is a failure.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <exception>
#include <iostream>
#include <stdexcept>
#include <string>

#include "comm/backends/cuda_plugin.h"
#include "tests/gpu/tested_device.h"
#include "tests/simulated_gpu/reports.h"

namespace {

constexpr int kSkipped = 77;

// The driver is asked, which needs no CUDA library. Empty where there is a GPU.
std::string why_no_gpu() {
  void* const driver = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (driver == nullptr) return std::string("no NVIDIA driver: ") + ::dlerror();
  const auto init = reinterpret_cast<int (*)(unsigned)>(::dlsym(driver, "cuInit"));
  const auto count = reinterpret_cast<int (*)(int*)>(::dlsym(driver, "cuDeviceGetCount"));
  if (init == nullptr || count == nullptr) return "the NVIDIA driver has no cuInit and cuDeviceGetCount";
  int devices = 0;
  const int error = init(0);
  if (error != 0) return "the NVIDIA driver offers no GPU: cuInit returns " + std::to_string(error);
  if (count(&devices) != 0 || devices == 0) return "the NVIDIA driver finds no GPU";
  if (devices < DS_GPUS) return "they need " + std::to_string(DS_GPUS) + ", found " + std::to_string(devices);
  return {};
}

// What a simulated GPU saw of a test that its results do not show.
class Reports : public testing::EmptyTestEventListener {
 public:
  explicit Reports(decltype(&ds_simulated_gpu_reports) reports) : reports_(reports) {}

  void OnTestEnd(const testing::TestInfo&) override {
    reports_([](const char* report) { ADD_FAILURE() << "simulated GPU: " << report; });
  }

 private:
  decltype(&ds_simulated_gpu_reports) reports_;
};

void listen_to_simulation() {
  const auto reports = reinterpret_cast<decltype(&ds_simulated_gpu_reports)>(
      ::dlsym(::dlopen(std::getenv("DS_CUDA_LIBRARY"), RTLD_NOW), "ds_simulated_gpu_reports"));
  if (reports == nullptr) throw std::runtime_error("DS_CUDA_LIBRARY names no simulated GPU");
  testing::UnitTest::GetInstance()->listeners().Append(new Reports(reports));
}

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (ds::test::tested_device().is_cpu()) return RUN_ALL_TESTS();
  // Asked once: a test's own processes may be shown no GPU by intent.
  const bool found = ds::test::device_is_simulated() || std::getenv("DS_TEST_GPU_FOUND") != nullptr;
  const std::string reason = found ? "" : why_no_gpu();
  if (!reason.empty()) {
    std::cout << "skipped, these tests need GPUs: " << reason << std::endl;
    return kSkipped;
  }
  ::setenv("DS_TEST_GPU_FOUND", "1", /*overwrite=*/1);
  try {
    // LibTorch looks once for what its CUDA library offers: what opens it must not be these lines where that is tested.
    if (DS_OPENS_CUDA) ds::comm::cuda_plugin();
    if (DS_OPENS_CUDA && ds::test::device_is_simulated()) listen_to_simulation();
  } catch (const std::exception& error) {
    std::cerr << "there is a GPU, but: " << error.what() << std::endl;
    return 1;
  }
  return RUN_ALL_TESTS();
}
