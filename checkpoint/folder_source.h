// Reads a checkpoint folder in dsengine's format. Every block that is read is compared with its checksum.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "dsengine/checkpoint.h"

namespace ds::checkpoint {

// `folder`: <save_dir>/<tag>. Reads the index and compares the files' sizes with it; a file is opened, and its header
// compared, when a tensor in it is asked for; whole files are never mapped. Throws IoError naming the file: missing,
// shorter or longer than the index says, damaged. So do reads. In one host's folder (Index::of_one_host) a file of
// another host may be missing; then reads of what is in it throw.
std::unique_ptr<Source> open_folder(const std::string& folder);

}  // namespace ds::checkpoint
