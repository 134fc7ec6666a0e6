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

}  // namespace ds
