// The device that tests in this folder are about: cuda:0. With DS_TEST_DEVICE=simulated that is the simulated GPU of
// tests/simulated_gpu, which DS_CUDA_LIBRARY names; with DS_TEST_DEVICE=cpu they compare the CPU with itself.
#pragma once

#include <c10/core/Device.h>

#include <cstdlib>
#include <string>

namespace ds::test {

inline std::string tested_device_name() {
  const char* const name = std::getenv("DS_TEST_DEVICE");
  return name == nullptr ? "cuda:0" : name;
}

inline bool device_is_simulated() { return tested_device_name() == "simulated"; }

inline c10::Device tested_device() { return c10::Device(device_is_simulated() ? "cuda:0" : tested_device_name()); }

}  // namespace ds::test
