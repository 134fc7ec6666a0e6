// The norm of the gradient of the whole model, over all ranks. optim/clip.h turns it into the clip factor, and
// engine/update/optimizer_step.cc joins the two.
#pragma once

#include <ATen/core/Tensor.h>

#include "model/state/model_state.h"

namespace ds::engine {

// Returns the L2 norm of the model's gradient over all ranks, with the loss scale in it, rounded to float32 unless the
// model is float64. Where the reducer keeps gradients local (1-bit optimizers) it is an upper bound: the norm over the
// gradients of all ranks, divided by sqrt(ranks) for a mean and multiplied by it for a sum. Called after
// finish_gradients(). Collective.
double global_norm(const ModelState& state);
// Returns the same norm as a float64 tensor [1] on the device, without waiting for it. It may be infinite for a finite
// gradient whose squares exceed float32, where global_norm() sums again in float64. Collective.
at::Tensor global_norm_on_device(const ModelState& state);

}  // namespace ds::engine
