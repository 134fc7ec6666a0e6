// core/memory_pool.h on LibTorch's CUDA allocator. Registered when the library is loaded.
#include "core/memory_pool.h"

#include <ATen/cuda/MemPool.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/util/Exception.h>

#include <string>
#include <thread>

namespace ds {
namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;

class CudaMemoryPool : public MemoryPool {
 public:
  c10::DataPtr take(size_t bytes) override {
    try {
      return take_from_pool(bytes);
    } catch (const c10::OutOfMemoryError&) {
      // While a pool is in use, the allocator gives back nothing that it keeps for others.
      allocator::emptyCache();
      return take_from_pool(bytes);
    }
  }
  void trim() override { allocator::emptyCache(pool_.id()); }

 private:
  c10::DataPtr take_from_pool(size_t bytes) {
    // Threads that allocate meanwhile go on with their own memory.
    allocator::beginAllocateToPool(pool_.device(), pool_.id(), [own = std::this_thread::get_id()](cudaStream_t) {
      return std::this_thread::get_id() == own;
    });
    const auto end = [this] { allocator::endAllocateToPool(pool_.device(), pool_.id()); };
    try {
      c10::DataPtr block = allocator::get()->allocate(bytes);
      end();
      return block;
    } catch (...) {
      end();
      throw;
    }
  }

  // Others may have free blocks of it before they find no memory at all.
  at::cuda::MemPool pool_{/*allocator=*/nullptr, /*is_user_created=*/true, /*use_on_oom=*/true};
};

// Made on the current device, which is the caller's.
std::unique_ptr<MemoryPool> make_cuda_pool(c10::Device) {
  if (allocator::name() != "native") return nullptr;
  return std::make_unique<CudaMemoryPool>();
}

const bool kPoolsRegistered = (set_memory_pools(&make_cuda_pool), true);

}  // namespace
}  // namespace ds
