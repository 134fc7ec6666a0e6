// Writes any checkpoint again in dsengine's format.
#pragma once

#include <string>

#include "dsengine/checkpoint.h"

namespace ds::checkpoint {

// `folder`: <save_dir>/<tag>; <save_dir>/latest then names it. As `ranks` ranks would have written it, tensor by
// tensor: what is in memory is at most one piece. Throws IoError.
void rewrite(Source& source, const std::string& folder, int ranks = 1);

}  // namespace ds::checkpoint
