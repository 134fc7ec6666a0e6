// Reduced gradients, as the optimizer and the program find them between the last backward() and step().
//
// With tensor_parallel.sequence_parallel whole parameters are summed ones (docs/tensor_parallel.md): of their gradients
// each rank of the tensor axis has a part, beside the reduction over data-parallel ranks. These are added up here,
// once.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <string>

#include "dsengine/comm.h"
#include "model/state/model_state.h"

namespace ds::engine {

// Adds up a gradient, wherever it is kept, over `ranks`. Collective over them.
void add_up(const at::Tensor& gradient, comm::Communicator& ranks, c10::Device device, const std::string& label);

// Waits for all reductions, and adds up what is summed. Collective.
void finish_gradients(const ModelState& state);
// Before a further backward pass adds to gradients that may have been finished: shares them out again.
void go_on_with_gradients(const ModelState& state);
// All gradients are dropped.
void forget_gradients(const ModelState& state);
// Likewise, and the memory that is kept for them from step to step is given up.
void release_gradients(const ModelState& state);

}  // namespace ds::engine
