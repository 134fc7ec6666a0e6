#include "offload/device_file_calls.h"

#include <atomic>

namespace ds::offload {
namespace {

constinit std::atomic<const DeviceFileCalls*> registered_file_calls = nullptr;

}  // namespace

void set_device_file_calls(const DeviceFileCalls* calls) { registered_file_calls.store(calls); }

const DeviceFileCalls* device_file_calls() { return registered_file_calls.load(); }

}  // namespace ds::offload
