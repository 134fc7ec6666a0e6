#include "core/replay/memory_writes.h"

#include <atomic>

namespace ds {
namespace {

std::atomic<MemoryWriteObserver> observer_of_process = nullptr;

}  // namespace

void note_memory_write(const at::Tensor& tensor) {
  const MemoryWriteObserver observer = observer_of_process.load(std::memory_order_acquire);
  if (observer != nullptr && tensor.defined()) observer(tensor);
}

void observe_memory_writes(MemoryWriteObserver observer) {
  observer_of_process.store(observer, std::memory_order_release);
}

}  // namespace ds
