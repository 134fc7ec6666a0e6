// One region between its forward and its backward pass: what it keeps, and how it is computed again.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "core/replay/replayed_values.h"
#include "dsengine/activation_checkpoint.h"
#include "recompute/checkpoint_thread.h"
#include "recompute/execution_state.h"
#include "recompute/kept_input.h"
#include "recompute/outside_tensors.h"

namespace ds::recompute {

// The form of an output, which a recomputation must give again.
struct OutputShape {
  bool defined = false;
  bool differentiable = false;  // a gradient of it may come
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> sizes;
};

struct Region {
  RegionFunction function;
  CheckpointOptions options;
  CheckpointThread thread;  // the settings for regions inside
  std::vector<at::Device> devices;
  ExecutionState state;
  ReplayTape decisions;
  std::vector<KeptInput> inputs;
  std::vector<OutsideTensor> outside;
  std::vector<OutputShape> outputs;

  // Computes the region again and runs its backward pass. `gradients`: of the differentiable outputs, undefined where
  // there is none. Returns those of the inputs that require one, then those of the outside tensors; undefined where it
  // is not `wanted` or there is none.
  torch::autograd::variable_list backward(torch::autograd::variable_list gradients,
                                          const std::vector<bool>& wanted) const;
};

std::vector<OutputShape> shapes_of(const std::vector<at::Tensor>& outputs);
void require_unchanged(const std::vector<OutsideTensor>& outside, const char* when);

}  // namespace ds::recompute
