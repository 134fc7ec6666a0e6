// The memory of gradients, kept from step to step, and how much of it there is.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/memory/memory_pool.h"

namespace ds::zero {

// Buffers go from one bucket to the next. Free ones stay here, as many as buckets that are reduced in order need: one
// that fills and two on their way. On a device their memory is apart from that of activations
// (core/memory/memory_pool.h). Not thread safe: used under the reducer's lock.
class BufferPool {
 public:
  // Gives a buffer [numel] with unspecified contents. All calls have the same dtype and device. Throws
  // c10::OutOfMemoryError.
  at::Tensor take(int64_t numel, const at::TensorOptions& options);
  // Takes back a buffer of take(), which nobody else uses any more.
  void give_back(const at::Tensor& buffer);
  // Counts memory of gradients that does not come from here: more, or less, of it.
  void count(int64_t bytes);
  // Frees the free buffers, between steps, when all others are gone; gives their memory back to the device and counts
  // from zero.
  void clear();
  // The most bytes since the last call, those of free buffers too.
  int64_t take_peak_bytes() { return std::exchange(peak_bytes_, bytes_); }

 private:
  at::Tensor make(int64_t numel, const at::TensorOptions& options);

  PooledMemory memory_;
  std::vector<at::Tensor> free_;  // the smallest first
  int64_t bytes_ = 0;
  int64_t peak_bytes_ = 0;
};

}  // namespace ds::zero
