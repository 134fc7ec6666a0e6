#include "tests/simulated_gpu/memory.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <new>

#include "core/device_functions.h"
#include "core/memory/memory_pool.h"
#include "tests/simulated_gpu/reports.h"
#include "tests/simulated_gpu/streams.h"

namespace ds::simulated_gpu {
namespace {

constexpr size_t kAlignment = 512;  // as LibTorch's on CUDA
constexpr int kNan = 0xff;          // every byte of a NaN, in every floating dtype

uintptr_t address_of(const void* data) { return reinterpret_cast<uintptr_t>(data); }

struct Block {
  void* data;
  size_t bytes;
  bool of_pool;
};

constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();
std::atomic<int64_t> bytes_of_pools = 0;
std::atomic<int64_t> most_of_pools = kNoLimit;
std::atomic<int64_t> trims_of_pools = 0;

void* take(size_t bytes) {
  const size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  void* const data = std::aligned_alloc(kAlignment, rounded);
  if (data == nullptr) throw std::bad_alloc();
  std::memset(data, kNan, bytes);
  return data;
}

void give_back(void* context) {
  const Block block = *static_cast<Block*>(context);
  delete static_cast<Block*>(context);
  if (block.of_pool) bytes_of_pools -= static_cast<int64_t>(block.bytes);
  Timeline::instance().free_memory(address_of(block.data), [block] {
    std::memset(block.data, kNan, block.bytes);
    std::free(block.data);
  });
}

c10::DataPtr make(size_t bytes, Where where, c10::Device device, size_t stream, bool of_pool = false) {
  if (bytes == 0) return {nullptr, device};
  void* const data = take(bytes);
  Timeline::instance().add_memory(address_of(data), bytes, where, stream);
  return {data, new Block{data, bytes, of_pool}, &give_back, device};
}

class DeviceMemory : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device = current_device();
    return make(bytes, Where::kDevice, device, current_number(device));
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& memory, c10::Stream stream) override { use_on(memory, number_of(stream)); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return {}; }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {}
};

class PoolMemory : public MemoryPool {
 public:
  c10::DataPtr take(size_t bytes) override {
    const auto more = static_cast<int64_t>(bytes);
    if (bytes_of_pools.fetch_add(more) + more > most_of_pools) {
      bytes_of_pools -= more;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "simulated GPU: out of memory for ", bytes, " bytes");
    }
    const c10::Device device = current_device();
    return make(bytes, Where::kDevice, device, current_number(device), /*of_pool=*/true);
  }
  void trim() override { ++trims_of_pools; }
};

constexpr DeviceMemoryPools kPools{
    [](c10::Device) -> std::unique_ptr<MemoryPool> { return std::make_unique<PoolMemory>(); }};

const bool kPoolsRegistered = (set_device_functions(&kPools), true);

// LibTorch's allocator of pinned memory waits by itself for the streams that copy.
class PinnedMemory : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override { return make(bytes, Where::kAllocatedHost, c10::kCPU, 0); }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

}  // namespace

c10::Allocator* device_allocator() {
  static auto* const allocator = new DeviceMemory;
  return allocator;
}

c10::Allocator* pinned_allocator() {
  static auto* const allocator = new PinnedMemory;
  return allocator;
}

void use_on(const c10::DataPtr& memory, size_t stream) {
  Timeline::instance().add_user(address_of(memory.get()), stream);
}

std::string register_host_memory(void* data, size_t bytes) {
  Timeline::instance().add_memory(address_of(data), bytes, Where::kRegisteredHost, 0);
  return {};
}

void unregister_host_memory(void* data) {
  const size_t bytes = Timeline::instance().free_memory(address_of(data), [] {});
  Timeline::instance().run_all_on(address_of(data), bytes);  // the pages go now
}

}  // namespace ds::simulated_gpu

extern "C" __attribute__((visibility("default"))) int64_t ds_simulated_gpu_pool_bytes() {
  return ds::simulated_gpu::bytes_of_pools;
}

extern "C" __attribute__((visibility("default"))) int64_t ds_simulated_gpu_pool_trims() {
  return ds::simulated_gpu::trims_of_pools;
}

extern "C" __attribute__((visibility("default"))) void ds_simulated_gpu_limit_pools(int64_t more) {
  using namespace ds::simulated_gpu;
  most_of_pools = more < 0 ? kNoLimit : bytes_of_pools + more;
}
