// The update of a slice by LibTorch's operators, in chunks of bounded memory, on any device.
//
// The three ways to update a slice: cpu_update.h (our vector kernels on a CPU), device_update.h (our kernels on a GPU,
// all slices in one launch), and this one, for optimizers without kernels and dtypes that kernels do not know.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

namespace ds::optimizers {

// Returns the dtype of the arithmetic for a master of dtype `master`, which is also the default dtype of states:
// float64 for float64, else float32.
at::ScalarType state_type(at::ScalarType master);

// Updates one chunk, which begins at element `begin`. Both tensors are [length], in state_type(); `master` is updated
// in place, `gradient` may be changed.
using SliceKernel = std::function<void(int64_t begin, const at::Tensor& master, const at::Tensor& gradient)>;
// Updates one chunk with its states. All tensors are [length], in state_type(); states are updated in place, and are
// undefined where those given to for_each_chunk() are.
using StatefulKernel =
    std::function<void(const at::Tensor& master, const at::Tensor& gradient, const std::vector<at::Tensor>& states)>;

// Whether a kernel makes temporary tensors.
enum class KernelMemory {
  kFused,       // it makes none, and gets the whole slice at once where no dtype must be converted
  kTemporaries  // it makes some, and always gets chunks
};

// Runs `kernel` over master and gradient (flat, equal length) in chunks, which are converted to and fro where their
// dtype is not state_type(). No gradients are recorded.
void for_each_chunk(const at::Tensor& master, const at::Tensor& gradient, KernelMemory memory,
                    const SliceKernel& kernel);
// Runs `kernel` over master, gradient and states, which may have any floating dtype, in chunks.
void for_each_chunk(const at::Tensor& master, const std::vector<at::Tensor>& states, const at::Tensor& gradient,
                    KernelMemory memory, const StatefulKernel& kernel);

// Returns the float32 by which LibTorch's fused kernels divide the gradient. Empty for a factor of exactly 1, and for a
// float64 master, where a float32 factor would cost half of the digits: see scale_wide().
std::optional<at::Tensor> fused_grad_scale(double gradient_scale, const at::Tensor& master);
// Multiplies a kernel's gradient in place where it is float64. It is called after the conversion, so that the factor is
// not rounded to the dtype in which the gradient came.
void scale_wide(const at::Tensor& gradient, double gradient_scale);
// Returns the step number as LibTorch's fused kernels take it.
at::Tensor fused_step(double step, at::Device device);

}  // namespace ds::optimizers
