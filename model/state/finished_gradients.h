// Reduced gradients, as the optimizer and the program find them between the last backward() and step().
//
// Beside the reduction over data-parallel ranks some gradients are partial sums along another axis
// (model/state/axes.h): those of tied weights on several stages of a pipeline and, with
// tensor_parallel.sequence_parallel, those of replicated parameters (docs/tensor_parallel.md). They are added up here,
// once.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <string>
#include <vector>

#include "dsengine/comm.h"
#include "model/state/model_state.h"

namespace ds::engine {

// Adds up a gradient, wherever it is kept, over `ranks`. Collective over them.
void add_up(const at::Tensor& gradient, comm::Communicator& ranks, c10::Device device, const std::string& label);

// Waits for all reductions, and adds up partial sums. Collective.
void finish_gradients(const ModelState& state);
// Shares added-up gradients out again, before a further backward pass adds to them.
void go_on_with_gradients(const ModelState& state);
// Drops all gradients.
void forget_gradients(const ModelState& state);
// Drops all gradients and gives up the memory that is kept for them from step to step.
void release_gradients(const ModelState& state);

// Numbers the trainable parameters that got no gradient on this rank since the last step, but for those that the
// program has frozen since initialize().
std::vector<int64_t> parameters_without_gradient(const ModelState& state);

}  // namespace ds::engine
