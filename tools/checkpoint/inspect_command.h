// `ds-tool checkpoint inspect`: what a checkpoint holds, without reading its tensors.
#pragma once

#include <ostream>

#include "dsengine/checkpoint.h"
#include "tools/checkpoint/location.h"

namespace ds::checkpoint::tool {

struct InspectOptions {
  bool json = false;     // one JSON object instead of text
  bool tensors = false;  // a line for each tensor
};

// Prints counters, optimizer, bytes by kind, files and the program's own state. Throws IoError.
void inspect(const Source& source, const Location& location, const InspectOptions& options, std::ostream& out);

}  // namespace ds::checkpoint::tool
