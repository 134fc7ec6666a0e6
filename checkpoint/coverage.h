// Whether the files of an index hold what its tensors are.
#pragma once

#include <string>

#include "checkpoint/index.h"

namespace ds::checkpoint {

// Every piece lies in its tensor, or in the part of it that it names, and in its file; every element of every tensor is
// there exactly once. All pieces of a tensor are of the whole, or of parts of one cut. Throws IoError that begins with
// `where`.
void require_complete(const Index& index, const std::string& where);

}  // namespace ds::checkpoint
