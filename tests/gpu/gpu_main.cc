// main() of tests that need a GPU. Without one it says so and ends with 77, which ctest reports as skipped. With one,
// whatever keeps the tests from running is a failure.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <exception>
#include <iostream>
#include <string>

#include "comm/cuda_plugin.h"
#include "tests/gpu/tested_device.h"

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
  return {};
}

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (ds::test::tested_device().is_cpu()) return RUN_ALL_TESTS();
  const std::string reason = why_no_gpu();
  if (!reason.empty()) {
    std::cout << "skipped, these tests need a GPU: " << reason << std::endl;
    return kSkipped;
  }
  try {
    // LibTorch looks once for what its CUDA library offers: that has to be loaded before anything asks.
    ds::comm::cuda_plugin();
  } catch (const std::exception& error) {
    std::cerr << "there is a GPU, but: " << error.what() << std::endl;
    return 1;
  }
  return RUN_ALL_TESTS();
}
