// The norm of the gradient of the whole model, over all ranks. optim/clip.h turns it into the clip factor, and
// engine/update/optimizer_step.cc joins the two.
#pragma once

#include <ATen/core/Tensor.h>

#include "model/state/model_state.h"

namespace ds::engine {

// Returns the L2 norm of the finished gradient over the whole model, with the loss scale still in it. Collective.
double global_norm(const ModelState& state);
// Computes that norm on the device, which nobody waits for: float64 [1]; not finite also where squares are beyond
// float32. Collective.
at::Tensor global_norm_on_device(const ModelState& state);

}  // namespace ds::engine
