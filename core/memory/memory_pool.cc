#include "core/memory/memory_pool.h"

#include <c10/core/DeviceGuard.h>

#include <atomic>

namespace ds {
namespace {

constinit std::atomic<MakeMemoryPool> registered_pools = nullptr;

}  // namespace

void set_memory_pools(MakeMemoryPool make) { registered_pools.store(make); }

c10::DataPtr PooledMemory::take(size_t bytes, c10::Device device) {
  const c10::OptionalDeviceGuard guard(device.is_cpu() ? std::nullopt : std::optional(device));
  if (!asked_) {
    asked_ = true;
    const MakeMemoryPool make = registered_pools.load();
    if (device.is_cuda() && make != nullptr) pool_ = make(device);
  }
  return pool_ ? pool_->take(bytes) : c10::GetAllocator(device.type())->allocate(bytes);
}

void PooledMemory::trim() {
  if (pool_) pool_->trim();
}

}  // namespace ds
