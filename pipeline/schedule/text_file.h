// Reading a small file whole. Torch-free, internal to pipeline/.
#pragma once

#include <string>

namespace ds::pipeline {

// A regular file of at most 1 GiB. Throws IoError naming the path and what was found.
std::string read_text_file(const std::string& path);

}  // namespace ds::pipeline
