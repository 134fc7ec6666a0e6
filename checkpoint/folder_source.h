// Reading and verifying a checkpoint folder in dsengine's format. Every block that is read is compared with its
// checksum.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "dsengine/checkpoint.h"

namespace ds::checkpoint {

// Opens `folder`, <save_dir>/<tag>. Reads the index and compares the files' sizes with it; a file is opened, and its
// header compared, when a tensor in it is asked for; whole files are never mapped. Throws IoError naming the file:
// missing, shorter or longer than the index says, damaged. Reads throw it too. In one host's folder
// (Index::of_one_host) a file of another host may be missing; then reads of what is in it throw.
std::unique_ptr<Source> open_folder(const std::string& folder);

// One thing that is wrong with a checkpoint folder.
struct Damage {
  std::string file;    // inside the folder
  std::string tensor;  // path, as in dsengine/checkpoint.h; empty: the file as a whole
  std::string what;    // expected and found
};

// Reads every byte of a checkpoint folder, compares it with the index and returns what is damaged; empty: the
// checkpoint is complete and whole. Throws IoError when there is no such folder, and for a folder in another format.
std::vector<Damage> verify(const std::string& folder);

}  // namespace ds::checkpoint
