// Memory of gathered buckets: blocks go from one bucket to the next.
//
// On the CPU they have pages of their own. In the C library's heap, small tensors that stay (activations) would land in
// the block of a released bucket; what is left no longer fits a bucket, and the heap grows by one bucket for each.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <utility>
#include <vector>

#include "core/memory/memory_pool.h"

namespace ds::zero {

// The free blocks of gathered buckets. Not thread safe. On other devices than the CPU, blocks come from and go to a
// pool of LibTorch's caching allocator at once, which knows streams (core/memory/memory_pool.h).
class GatherMemory {
 public:
  // Takes a block with unspecified contents. Throws std::bad_alloc or what LibTorch's allocator throws when there is
  // none.
  c10::DataPtr take(size_t bytes, c10::Device device);
  void give_back(c10::DataPtr block, size_t bytes);
  // Frees, at the end of a step, what was not needed since the last call. The kernel may take the pages of the other
  // free blocks where it needs memory; until it does, taking them again costs nothing.
  void lend_to_kernel();
  size_t free_bytes() const { return free_bytes_; }
  // Frees the blocks that no bucket has, and gives them back to the device.
  void clear();

 private:
  std::vector<std::pair<size_t, c10::DataPtr>> free_;  // the one given back last at the end
  size_t free_bytes_ = 0;
  size_t taken_bytes_ = 0;
  size_t most_taken_bytes_ = 0;  // since lend_to_kernel()
  PooledMemory of_device_;
};

}  // namespace ds::zero
