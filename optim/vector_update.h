// Chooses between the vector kernels (optim/kernels) and LibTorch's for the update of a slice.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "optim/kernels/slice_arrays.h"

namespace ds::optimizers {

// The tensors of one slice, flat and of equal length. `copy` gets the new weights; undefined: not wanted.
struct SliceTensors {
  at::Tensor master;
  std::vector<at::Tensor> states;  // as the vector kernel says, at most three; an undefined one is left out
  at::Tensor gradient;
  double gradient_scale = 1.0;
  at::Tensor copy;
};

// The memory of a slice whose types kernels know; with its copy, unless `with_copy` is false.
SliceArrays arrays_of(const SliceTensors& slice, bool with_copy = true);

// Updates elements `begin` to `end` - 1 of arrays.
using VectorKernel = std::function<void(const SliceArrays& arrays, int64_t begin, int64_t end)>;

// Runs `kernel` on LibTorch's threads where it can: master, states (all of one dtype) and gradient are float32,
// bfloat16 or float16 on the CPU, and contiguous. It writes the copy too, if that is such a tensor as well. Otherwise
// runs `libtorch`, which updates master and states itself. No gradients are recorded.
void update_slice(const SliceTensors& slice, const VectorKernel& kernel, const std::function<void()>& libtorch);

}  // namespace ds::optimizers
