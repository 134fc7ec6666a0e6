// Reading a small file whole. Torch-free, internal to pipeline/.
#pragma once

#include <string>

namespace ds::pipeline {

// Throws IoError naming the path and the system's reason.
std::string read_text_file(const std::string& path);

}  // namespace ds::pipeline
