// The meaning of a path that is given to `ds-tool checkpoint`.
#pragma once

#include <string>
#include <vector>

#include "checkpoint/format.h"

namespace ds::checkpoint::tool {

struct Location {
  std::string folder;  // one tag, a folder of weights, or a .safetensors file
  Format format = Format::kUnknown;
  std::string latest;             // tag named by the save_dir's `latest`; empty when the path was no save_dir
  std::vector<std::string> tags;  // of that save_dir, in the order of their steps
};

// Finds the checkpoint at `path`: a save_dir (a folder with a file `latest`), which stands for the tag named there, or
// what Location::folder is. Throws IoError: no such path, a `latest` that names no folder; a save_dir without `latest`,
// with its tags.
Location locate(const std::string& path);

}  // namespace ds::checkpoint::tool
