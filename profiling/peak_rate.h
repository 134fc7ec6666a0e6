// The most that a device computes: by which the use of its arithmetic (MFU) is judged.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

namespace ds::profiling {

// Multiplies square matrices of a size at which the device is at its fastest, some times, and returns the best rate in
// floating-point operations a second, two for a multiply-accumulate. On a CPU with the threads that LibTorch has now.
// It takes some tens of milliseconds and, on a GPU, some hundred MiB that are given back to LibTorch's allocator. Draws
// no random numbers.
double measured_peak(c10::Device device, c10::ScalarType dtype);

}  // namespace ds::profiling
