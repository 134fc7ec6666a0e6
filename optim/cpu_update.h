// The update of one slice by the vector kernels for CPUs (optim/kernels), with LibTorch's operators where these cannot
// work.
//
// An optimizer with such kernels calls update_slice() for one slice on any device. Slices on a GPU are updated by
// device_update.h, all in one launch. What the kernels do not take is updated by chunked_update.h, which the optimizer
// hands over.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "optim/kernels/slice_arrays.h"

namespace ds::optimizers {

// The tensors of one slice, flat and of equal length.
struct SliceTensors {
  at::Tensor master;
  std::vector<at::Tensor> states;  // at most three, in the order of the vector kernel; undefined ones are left out
  at::Tensor gradient;
  double gradient_scale = 1.0;
  at::Tensor copy;  // gets the new weights; undefined: not wanted
};

// Returns the memory of a slice whose dtypes the kernels know, with its copy unless `with_copy` is false.
SliceArrays arrays_of(const SliceTensors& slice, bool with_copy = true);

// Updates elements `begin` to `end` - 1 of arrays.
using VectorKernel = std::function<void(const SliceArrays& arrays, int64_t begin, int64_t end)>;

// Runs `kernel` on LibTorch's threads where it can: master, states (all of one dtype) and gradient are float32,
// bfloat16 or float16 on the CPU, and contiguous. It writes the copy too, if that is such a tensor as well. Otherwise
// runs `libtorch`, which updates master and states itself. No gradients are recorded.
void update_slice(const SliceTensors& slice, const VectorKernel& kernel, const std::function<void()>& libtorch);

}  // namespace ds::optimizers
