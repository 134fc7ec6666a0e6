// Bytes that tensors take and give back, as LibTorch's allocators report them.
#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstdint>
#include <memory>

namespace ds::profiling {

// Counts, while it lives, what the thread that made it (and autograd for it) allocates and frees, on all devices.
// Each allocation is reported one by one: for looking, not for every run. Takes the place of a LibTorch profiler on
// this thread. Destroyed by the thread that made it, the last one made first.
class TensorMemory {
 public:
  TensorMemory();
  ~TensorMemory();
  TensorMemory(const TensorMemory&) = delete;
  TensorMemory& operator=(const TensorMemory&) = delete;

  // Bytes of the tensors that were made since this object was, less the bytes that were freed since: negative when
  // older tensors were freed.
  int64_t live_bytes() const;
  // The largest live_bytes() since this object was made or the last call.
  int64_t take_peak_bytes();

 private:
  class Counter;
  std::shared_ptr<Counter> counter_;
  c10::DebugInfoGuard guard_;
};

}  // namespace ds::profiling
