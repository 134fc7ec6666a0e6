#include "profiling/tensor_memory.h"

#include <c10/core/Allocator.h>

#include <algorithm>
#include <mutex>
#include <utility>

namespace ds::profiling {

class TensorMemory::Counter : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(void* /*address*/, int64_t change, size_t /*allocated*/, size_t /*reserved*/,
                         c10::Device /*device*/) override {
    const std::lock_guard lock(mutex_);
    live_ += change;
    peak_ = std::max(peak_, live_);
  }
  bool memoryProfilingEnabled() const override { return true; }

  int64_t live() {
    const std::lock_guard lock(mutex_);
    return live_;
  }
  int64_t take_peak() {
    const std::lock_guard lock(mutex_);
    return std::exchange(peak_, live_);
  }

 private:
  std::mutex mutex_;  // autograd's device threads report too
  int64_t live_ = 0;
  int64_t peak_ = 0;
};

TensorMemory::TensorMemory()
    : counter_(std::make_shared<Counter>()), guard_(c10::DebugInfoKind::PROFILER_STATE, counter_) {}

TensorMemory::~TensorMemory() = default;

int64_t TensorMemory::live_bytes() const { return counter_->live(); }

int64_t TensorMemory::take_peak_bytes() { return counter_->take_peak(); }

}  // namespace ds::profiling
