// Reads every byte of a checkpoint folder and compares it with its index.
#pragma once

#include <string>
#include <vector>

namespace ds::checkpoint {

struct Damage {
  std::string file;    // inside the folder
  std::string tensor;  // path, as in dsengine/checkpoint.h; empty: the file as a whole
  std::string what;    // expected and found
};

// What is damaged; empty: the checkpoint is complete and whole. Only for folders in dsengine's own format. Throws
// IoError when there is no such folder.
std::vector<Damage> verify(const std::string& folder);

}  // namespace ds::checkpoint
