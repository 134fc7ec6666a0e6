// `ds-tool checkpoint verify`: whether a checkpoint is complete and whole.
#pragma once

#include <ostream>

#include "tools/checkpoint/location.h"

namespace ds::checkpoint::tool {

// dsengine's format: every byte against the checksums of the index. Other formats have none; of them the structure is
// checked and every tensor read. Prints each damage. Returns whether there was none. Throws IoError for a path that
// holds no checkpoint.
bool verify_and_print(const Location& location, std::ostream& out);

}  // namespace ds::checkpoint::tool
