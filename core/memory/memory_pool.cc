#include "core/memory/memory_pool.h"

#include <c10/core/DeviceGuard.h>

#include "core/device_functions.h"

namespace ds {

c10::DataPtr PooledMemory::take(size_t bytes, c10::Device device) {
  const c10::OptionalDeviceGuard guard(device.is_cpu() ? std::nullopt : std::optional(device));
  if (!asked_) {
    asked_ = true;
    const auto* const pools = device_functions<DeviceMemoryPools>();
    if (device.is_cuda() && pools != nullptr) pool_ = pools->make(device);
  }
  return pool_ ? pool_->take(bytes) : c10::GetAllocator(device.type())->allocate(bytes);
}

void PooledMemory::trim() {
  if (pool_) pool_->trim();
}

}  // namespace ds
