// Kernels of ours in front of those that LibTorch, or another part of the project, has for an operator: they compute
// what is theirs, and hand all else to the kernel behind.
#pragma once

#include <ATen/core/boxing/BoxedKernel.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>

namespace ds {

// The kernel that computes the operator at a key (a backend's, its autograd's or autocast's) as long as nothing is put
// in front of it; none: calls pass the key. For a boxed functor (c10::OperatorKernel) to hold: what is registered later
// stands in front of it and leaves it as it is. Any thread.
std::optional<c10::SafeKernelFunction> kernel_at(const c10::OperatorHandle& op, c10::DispatchKey key);

// Makes `kernel` compute the operator at the key from now on, for the rest of the process. Any thread, while no other
// one runs the operator, as for each registration with LibTorch.
void put_in_front(const c10::OperatorHandle& op, c10::DispatchKey key, c10::BoxedKernel kernel);

}  // namespace ds
