// Compressed layers of an engine's model, before its parameters are laid out.
#pragma once

#include "dsengine/config.h"
#include "dsengine/initialize.h"

namespace ds::engine {

// Prepares the module where the config asks for it and the program has not. Throws ConfigError for models that cannot
// be: pipelines, split tensors, and layer_reduction without a teacher.
void set_up_compression(const InitializeOptions& options, const config::DsConfig& config, bool is_pipeline,
                        int tensor_ranks);

}  // namespace ds::engine
