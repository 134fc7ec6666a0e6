// Writing the model's weights to one file, parameter by parameter.
#pragma once

#include <string>

#include "model/state/model_state.h"

namespace ds::engine {

// Parameters, under all their names, and buffers, as a safetensors file that the first rank with this part of the model
// writes. Its folder is made. Collective; when the file cannot be written, every rank throws (that rank the cause, the
// others IoError) and an older file is left as it was.
void save_model(const ModelState& state, const std::string& path, bool with_frozen);

}  // namespace ds::engine
