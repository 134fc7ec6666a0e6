// core/memory/memory_pool.h on LibTorch's CUDA allocator. Registered when the library is loaded.
#include "core/memory/memory_pool.h"

#include <ATen/cuda/MemPool.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/util/Exception.h>

#include <exception>
#include <thread>

#include "core/device_functions.h"
#include "core/log.h"
#include "core/without_stack.h"

namespace ds {
namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;

// Note [Pools of LibTorch's CUDA allocator]
// The allocator counts who uses a pool, and gives memory back to the device only of pools that nobody uses. So trim()
// leaves the pool to the allocator and goes on with another: what is free goes at once, and blocks that are still there
// go with the emptyCache() after their end, which a failing allocation makes too. at::cuda::MemPool cannot do that:
// each beginAllocateToPool() counts one use more, which it does not take back, and its destructor expects one. Nor do
// the pools lend to others that find no memory (use_on_oom): the allocator would take from them before it gives back
// what it keeps itself, and two threads at once are an error there.
class CudaMemoryPool : public MemoryPool {
 public:
  CudaMemoryPool() { begin(); }
  ~CudaMemoryPool() override { give_up(); }

  c10::DataPtr take(size_t bytes) override {
    try {
      return take_from_pool(bytes);
    } catch (const c10::OutOfMemoryError&) {
      // While a pool is in use, the allocator gives back nothing that it keeps for others.
      allocator::emptyCache();
      return take_from_pool(bytes);
    }
  }
  void trim() override {
    give_up();
    begin();
  }

 private:
  void begin() {
    id_ = at::cuda::MemPool::graph_pool_handle(/*is_user_created=*/true);
    allocator::createOrIncrefPool(device_, id_);
  }
  void give_up() noexcept {
    try {
      allocator::releasePool(device_, id_);
      allocator::emptyCache(id_);
    } catch (const std::exception& error) {
      log::warning("memory of GPU ", static_cast<int>(device_),
                   " for buffers could not be given back: ", without_stack(error.what()));
    }
  }

  c10::DataPtr take_from_pool(size_t bytes) {
    // Threads that allocate meanwhile go on with their own memory.
    allocator::beginAllocateToPool(
        device_, id_, [own = std::this_thread::get_id()](cudaStream_t) { return std::this_thread::get_id() == own; });
    const auto end = [this] {
      allocator::endAllocateToPool(device_, id_);
      allocator::releasePool(device_, id_);
    };
    try {
      c10::DataPtr block = allocator::get()->allocate(bytes);
      end();
      return block;
    } catch (...) {
      end();
      throw;
    }
  }

  const c10::DeviceIndex device_ = c10::cuda::current_device();
  c10::MempoolId_t id_;
};

// Made on the current device, which is the caller's.
std::unique_ptr<MemoryPool> make_cuda_pool(c10::Device) {
  if (allocator::name() != "native") return nullptr;
  return std::make_unique<CudaMemoryPool>();
}

constexpr DeviceMemoryPools kCudaPools{&make_cuda_pool};

const bool kPoolsRegistered = (set_device_functions(&kCudaPools), true);

}  // namespace
}  // namespace ds
