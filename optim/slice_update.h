// Running an element-wise optimizer kernel over a slice in bounded memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

namespace ds::optimizers {

// The dtype that the arithmetic, and states of which nobody says otherwise, have for a master of dtype `master`:
// float32, or float64 for float64.
at::ScalarType state_type(at::ScalarType master);

// kernel(begin, master, gradient): both [length], in state_type(); `master` is updated in place, `gradient` may be.
using SliceKernel = std::function<void(int64_t begin, const at::Tensor& master, const at::Tensor& gradient)>;
// The same with the states, [length] and in state_type() too, updated in place; undefined where the given one is.
using StatefulKernel =
    std::function<void(const at::Tensor& master, const at::Tensor& gradient, const std::vector<at::Tensor>& states)>;

// kFused: the kernel makes no temporaries, so it gets the whole slice at once where no dtype must be converted.
// kTemporaries: it makes some, so it always gets chunks.
enum class KernelMemory { kFused, kTemporaries };

// Runs `kernel` over master and gradient (flat, equal length), in chunks, converted to and fro where their dtype is not
// the state type: memory beside the slice stays bounded. No gradients are recorded.
void for_each_chunk(const at::Tensor& master, const at::Tensor& gradient, KernelMemory memory,
                    const SliceKernel& kernel);
// The same with states, of any floating dtype.
void for_each_chunk(const at::Tensor& master, const std::vector<at::Tensor>& states, const at::Tensor& gradient,
                    KernelMemory memory, const StatefulKernel& kernel);

// LibTorch's fused kernels divide the gradient by this, a float32; nothing for a factor of exactly 1, and nothing for a
// float64 master: a float32 factor would cost half of the digits. See scale_wide().
std::optional<at::Tensor> fused_grad_scale(double gradient_scale, const at::Tensor& master);
// Multiplies a kernel's gradient in place where it is float64: after the conversion, so that no factor is rounded to
// the dtype in which the gradient came.
void scale_wide(const at::Tensor& gradient, double gradient_scale);
// The step number in the form these kernels take.
at::Tensor fused_step(double step, at::Device device);

}  // namespace ds::optimizers
