// The random numbers of simulated devices.
#pragma once

#include <ATen/core/Generator.h>

namespace ds::simulated_gpu {

// The generator of the CPU that makes the numbers of a generator of cuda.
at::Generator numbers_of(const at::Generator& generator);
const at::Generator& default_generator(c10::DeviceIndex device);

}  // namespace ds::simulated_gpu
