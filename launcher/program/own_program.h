// The file of this program.
#pragma once

#include <string>

namespace ds::launcher {

struct OwnProgram {
  std::string path;  // where other hosts have it too
  std::string hash;  // file_hash()
};

// To be asked once, at the start: a job outlives its ds-launch file, which an installation may replace meanwhile.
// Throws IoError.
OwnProgram find_own_program();

}  // namespace ds::launcher
