// Linear layers of a model that compute on FP8: which, whether the device can, and their scales.
#pragma once

#include "dsengine/config.h"
#include "engine/state/model_state.h"

namespace ds::engine {

// Sets ModelState::fp8. Throws ConfigError, before any change, that names the key and the layer: a pattern without
// layers, sizes or dtypes that FP8 products do not take, or a device without them.
void set_up_fp8(ModelState& model, const config::Fp8Section& section);

}  // namespace ds::engine
