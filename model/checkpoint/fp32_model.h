// Writing the float32 weights of the model to one file that plain LibTorch loads.
#pragma once

#include <string>

#include "model/state/model_state.h"

namespace ds::engine {

// Lets the first rank with this part of the model write whole_masters(), each tied weight under all its names, and
// buffers to a file for torch::load(module, path); 16-bit buffers become float32. That rank holds one copy of the
// weights on the host meanwhile. Makes the folder. Collective; when the file cannot be written, every rank throws (that
// rank the cause, the others IoError) and an older file is left as it was.
void save_fp32_model(const ModelState& state, const std::string& path);

}  // namespace ds::engine
