// The device that tests in this folder are about: cuda:0. With DS_TEST_DEVICE=cpu they compare the CPU with itself,
// which checks the tests where there is no GPU.
#pragma once

#include <c10/core/Device.h>

#include <cstdlib>
#include <string>

namespace ds::test {

inline c10::Device tested_device() {
  const char* const name = std::getenv("DS_TEST_DEVICE");
  return c10::Device(name == nullptr ? "cuda:0" : name);
}

}  // namespace ds::test
