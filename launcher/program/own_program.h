// The file of this program, and the hash by which hosts compare files.
#pragma once

#include <string>

namespace ds::launcher {

// XXH3 of the file's bytes, 32 hexadecimal digits. Throws IoError when it cannot be read.
std::string file_hash(const std::string& path);

struct OwnProgram {
  std::string path;  // where other hosts have it too
  std::string hash;  // file_hash()
};

// Finds the file and its hash. To be called once, at the start: a job outlives its ds-launch file, which an
// installation may replace meanwhile. Throws IoError.
OwnProgram find_own_program();

}  // namespace ds::launcher
