// Chooses the Linear layers of a model that compute on FP8, and checks that the device can. layers/fp8/linear.h
// computes them: the modules stay, and LibTorch's operators find a layer by its weight.
#pragma once

#include "dsengine/config.h"
#include "model/state/model_state.h"

namespace ds::engine {

// Before the model is laid out: throws ConfigError that names the key and the layer: a pattern without layers, sizes
// that FP8 products do not take, or a device without them.
void require_fp8(const ModelState& model, const config::Fp8Section& section);

// Sets ModelState::fp8, of a model that has its dtypes. Throws ConfigError, before any change, for a dtype that FP8
// products do not take.
void set_up_fp8(ModelState& model, const config::Fp8Section& section);

}  // namespace ds::engine
