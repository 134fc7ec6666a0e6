// activation_checkpointing.modules: modules of the model that drop activations, by patterns of names.
#pragma once

#include "dsengine/config.h"
#include "model/state/model_state.h"

namespace ds::engine {

// Chooses these modules on this thread (dsengine/module_checkpointing.h), until the model's state ends. Of a pipeline
// these are layers of this rank's stages; collective over all ranks then. Throws ConfigError for a pattern that names
// no module, on no rank, and for a module that cannot be known.
void choose_recomputed_modules(ModelState& model, const config::DsConfig& config);
// Lets the chosen modules drop activations on this thread, and on no other any more.
void recompute_on_this_thread(ModelState& model, const config::DsConfig& config);

}  // namespace ds::engine
