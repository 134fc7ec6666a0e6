// Checkpoints of which each host keeps the files of its own ranks: what its index says of the files of other hosts.
#pragma once

#include "checkpoint/index.h"

namespace ds::checkpoint {

// Leaves out of `other` the pieces of which `here` has the elements, so that each element has one place. What several
// hosts hold each of them has written whole: a piece is there entirely or not at all; throws IoError for one that is
// there in part.
void leave_out_covered(Index& other, const Index& here);

}  // namespace ds::checkpoint
