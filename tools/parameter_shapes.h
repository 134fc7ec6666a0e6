// Names and sizes of a model's parameters, out of files. Torch-free: of safetensors the header alone is read.
#pragma once

#include <string>
#include <vector>

#include "dsengine/split_plan.h"

namespace ds::tool {

// Of a .safetensors file, of all of them in a folder, or of a JSON object {"name": [sizes], ...}; in the order of the
// file. Throws IoError naming the path for what cannot be read, and for a name that comes twice.
std::vector<parallel::NamedShape> read_parameter_shapes(const std::string& path);

}  // namespace ds::tool
