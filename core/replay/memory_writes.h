// Memory of tensors that something else than an operator writes: a collective, a copy by its pointer. Who computes
// tensors again from recorded operators (activation checkpointing of modules) has to know.
#pragma once

#include <ATen/core/Tensor.h>

namespace ds {

// Tells the observer that a tensor's memory is about to be written; to be called before the first byte changes, on the
// thread that asks for it. Costs a load where nobody records.
void note_memory_write(const at::Tensor& tensor);

// Sets the observer for the rest of the process; there is one at most. It must not throw.
using MemoryWriteObserver = void (*)(const at::Tensor& tensor);
void observe_memory_writes(MemoryWriteObserver observer);

// While it lives, this thread's writes bring values that the memory already has for all who know it, as where a
// released parameter is gathered again: the observer is not told of writes, nor are operators among them recorded.
// Scopes nest.
class SameValues {
 public:
  SameValues();
  ~SameValues();
  SameValues(const SameValues&) = delete;
  SameValues& operator=(const SameValues&) = delete;

  static bool in_force();
};

}  // namespace ds
