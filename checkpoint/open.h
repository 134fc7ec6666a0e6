// Opens whatever checkpoint a folder holds.
#pragma once

#include <memory>
#include <string>

#include "dsengine/weights.h"

namespace ds::checkpoint {

// `folder`: one tag (<save_dir>/<tag>) in dsengine's format or DeepSpeed's (stages 0 to 3), a folder of model weights
// in Hugging Face's layout (model.safetensors, or shards with model.safetensors.index.json), or a .safetensors file.
// Throws IoError saying what was looked for and what is there.
std::unique_ptr<Source> open(const std::string& folder);

}  // namespace ds::checkpoint
