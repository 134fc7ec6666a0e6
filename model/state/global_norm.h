// The norm of the gradient of the whole model, over all ranks. optim/clip.h turns it into the clip factor, and
// engine/update/optimizer_step.cc joins the two.
#pragma once

#include <ATen/core/Tensor.h>

#include "model/state/model_state.h"

namespace ds::engine {

// Returns the L2 norm of the reduced gradient of all trainable parameters, each counted once, over all ranks. The loss
// scale is still in it. The norm is rounded to float32 unless the model is float64, and is not finite where a gradient
// is not. Where the reducer keeps gradients local (1-bit optimizers) it is an upper bound: the root mean square of the
// norms of the ranks' own gradients, times the number of ranks where gradients are added and not averaged. Called after
// finish_gradients(), on the engine's thread; waits for the device. Collective over all ranks; throws CommError.
double global_norm(const ModelState& state);
// Returns the same norm as a float64 tensor [1] on the device, without waiting for it. It may be infinite for a finite
// gradient whose squares exceed float32, which global_norm() sums again in float64. Collective over all ranks.
at::Tensor global_norm_on_device(const ModelState& state);

}  // namespace ds::engine
