// Reads a checkpoint folder in dsengine's format. Every block that is read is compared with its checksum.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "checkpoint/source.h"

namespace ds::checkpoint {

// `folder`: <save_dir>/<tag>. Reads the index and looks at the files' sizes and headers; tensors are read when they are
// asked for, without mapping whole files. Throws IoError naming the file: missing, shorter or longer than the index
// says, damaged.
std::unique_ptr<Source> open_folder(const std::string& folder);

}  // namespace ds::checkpoint
