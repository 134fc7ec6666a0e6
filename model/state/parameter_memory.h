// The memory of parameters before it is laid into buckets: who shares it.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <functional>

namespace ds::engine {

// Looks at the storages of a module's parameters, before these get memory in buckets: whoever shares it with a
// parameter would keep what the parameter was then, without a word.
//
// Throws UsageError, which begins with `call` and names both, where two parameters that are different tensors have
// elements in common and one of them is trained. A parameter under several names is one tensor. Views of one storage
// that have no element in common (weights of recurrent layers in one buffer) are fine.
//
// Warns of parameters, in the log of the rank that `says`, whose memory somebody else holds: a buffer of the module, an
// alias that the program has kept (detach(), data(), a view), or the program itself, which has given it to from_blob()
// without a deleter. What holds the parameter itself, as optimizers do, is no other owner. Not seen: pointers of the
// program's, memory of from_blob() with a deleter, other tensors over such memory.
//
// `known`: whether a parameter is left out, because its memory is this library's already. May be empty.
void require_own_memory(const torch::nn::Module& module, const char* call, bool says,
                        const std::function<bool(const at::Tensor&)>& known = {});

}  // namespace ds::engine
