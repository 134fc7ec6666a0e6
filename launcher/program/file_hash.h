// What tells two files apart.
#pragma once

#include <string>

namespace ds::launcher {

// XXH3 of the file's bytes, 32 hexadecimal digits. Throws IoError when it cannot be read.
std::string file_hash(const std::string& path);

}  // namespace ds::launcher
