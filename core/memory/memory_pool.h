// Memory of a device for large buffers that come and go, apart from what its other tensors have.
//
// In one heap, small tensors that stay (activations) land in the memory of a buffer that was given back; what is left
// no longer holds a buffer, and the next one takes new memory from the device, or finds none.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <memory>

namespace ds {

// A pool of a device's memory. Blocks belong to the stream that is current where they are taken, as all memory of
// LibTorch's, and may outlive the pool. Not thread safe.
class MemoryPool {
 public:
  MemoryPool() = default;
  virtual ~MemoryPool() = default;
  MemoryPool(const MemoryPool&) = delete;
  MemoryPool& operator=(const MemoryPool&) = delete;

  // Returns a block with unspecified contents on the pool's device, which is current. Throws c10::OutOfMemoryError
  // where there is none, even after what LibTorch's allocator kept was given back to the device.
  virtual c10::DataPtr take(size_t bytes) = 0;
  // Gives back to the device the memory that no block has. Blocks that are in use go, once they are freed, when memory
  // runs out. May wait for the device.
  virtual void trim() = 0;
};

// How a device's library makes its pools (core/device_functions.h).
struct DeviceMemoryPools {
  std::unique_ptr<MemoryPool> (*make)(c10::Device device) = nullptr;
};

// Memory of one device, from a pool of its own; on the CPU, and where its allocator has no pools (LibTorch's
// cudaMallocAsync), from LibTorch's allocator. Not thread safe.
class PooledMemory {
 public:
  // Takes a block as MemoryPool::take() does; all calls name one device.
  c10::DataPtr take(size_t bytes, c10::Device device);
  void trim();

 private:
  bool asked_ = false;
  std::unique_ptr<MemoryPool> pool_;
};

}  // namespace ds
