// The current device and streams of a thread.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstddef>

#include "tests/simulated_gpu/timeline.h"

namespace ds::simulated_gpu {

inline constexpr c10::DeviceIndex kDevices = 8;
// How many of them this process sees: all, or as many as DS_SIMULATED_GPUS says.
c10::DeviceIndex visible_devices();

c10::Device current_device();
void set_device(c10::Device device);
// A thread asks about what `device` was given. CUDA makes a context on the thread's current device then, which is
// reported where it is another one.
void ask_about(c10::Device device);
// `device` may have no index: the current one.
c10::Stream current_stream(c10::Device device);
c10::Stream set_stream(c10::Stream stream);  // returns the one before

size_t number_of(const c10::Stream& stream);
size_t current_number(c10::Device device);
// Streams for who takes a pointer, as CUDA's cudaStream_t is one.
void* handle_of(const c10::Stream& stream);
size_t number_of_handle(void* handle);

}  // namespace ds::simulated_gpu
