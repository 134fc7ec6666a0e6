// Gives work on raw memory to a device's library.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace ds {

// Calls give(stream) with `device` as the current one and the handle of its current stream (CUDA: a cudaStream_t).
// Returns the result of the call: why the work could not be given, or null.
template <class Give>
const char* give_to_current_stream(at::Device device, const Give& give) {
  const c10::DeviceGuard guard(device);
  return give(c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle());
}

// Throws ConfigError, from `who`, where `error` is not null.
void require_given(const char* error, const char* who, at::Device device);

}  // namespace ds
