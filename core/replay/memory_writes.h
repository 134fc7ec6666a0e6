// Memory of tensors that something else than an operator writes: a collective, a copy by its pointer. Who computes
// tensors again from recorded operators (activation checkpointing of modules) has to know.
#pragma once

#include <ATen/core/Tensor.h>

namespace ds {

// Before the first byte changes, on the thread that asks for it. Costs a load where nobody records.
void note_memory_write(const at::Tensor& tensor);

// Who is told, for the rest of the process; one at most. Must not throw.
using MemoryWriteObserver = void (*)(const at::Tensor& tensor);
void observe_memory_writes(MemoryWriteObserver observer);

// What this thread writes while it lives are the values that the memory has for all who know it, as where a released
// parameter is gathered again: writes are not told, nor are operators among them recorded. Scopes nest.
class SameValues {
 public:
  SameValues();
  ~SameValues();
  SameValues(const SameValues&) = delete;
  SameValues& operator=(const SameValues&) = delete;

  static bool in_force();
};

}  // namespace ds
