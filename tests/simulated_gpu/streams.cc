#include "tests/simulated_gpu/streams.h"

#include <algorithm>
#include <array>
#include <cstdlib>

namespace ds::simulated_gpu {
namespace {

thread_local c10::DeviceIndex device_index = 0;
thread_local std::array<c10::StreamId, kDevices> stream_ids{};

c10::DeviceIndex index_of(c10::Device device) { return device.has_index() ? device.index() : device_index; }

}  // namespace

c10::DeviceIndex visible_devices() {
  static const c10::DeviceIndex count = [] {
    const char* const text = std::getenv("DS_SIMULATED_GPUS");
    const int asked = text == nullptr ? kDevices : std::atoi(text);
    return static_cast<c10::DeviceIndex>(std::clamp<int>(asked, 0, kDevices));
  }();
  return count;
}

c10::Device current_device() { return {c10::kCUDA, device_index}; }

void set_device(c10::Device device) {
  if (device.has_index()) device_index = device.index();
}

void ask_about(c10::Device device) {
  if (index_of(device) == device_index) return;
  Timeline::instance().add_report("a thread with the current device " + current_device().str() + " asked about " +
                                  device.str() + ": expected the same device, or there is a context on both");
}

c10::Stream current_stream(c10::Device device) {
  const c10::DeviceIndex index = index_of(device);
  return c10::Stream(c10::Stream::UNSAFE, {c10::kCUDA, index}, stream_ids.at(static_cast<size_t>(index)));
}

c10::Stream set_stream(c10::Stream stream) {
  const c10::Stream before = current_stream(stream.device());
  stream_ids.at(static_cast<size_t>(stream.device_index())) = stream.id();
  return before;
}

size_t number_of(const c10::Stream& stream) { return Timeline::instance().stream(stream.device_index(), stream.id()); }

size_t current_number(c10::Device device) { return number_of(current_stream(device)); }

void* handle_of(const c10::Stream& stream) { return reinterpret_cast<void*>(number_of(stream) + 1); }

size_t number_of_handle(void* handle) { return reinterpret_cast<uintptr_t>(handle) - 1; }

}  // namespace ds::simulated_gpu
