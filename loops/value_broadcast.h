// Values of parameters and buffers that become those of one rank.
#pragma once

#include <vector>

#include "dsengine/comm.h"
#include "zero/parameter_bucket.h"

namespace ds::loops {

// The elements of `tensors` become rank `root`'s, in place; graphs that have saved them go on (their versions stay).
// Collective; tensors are alike on all ranks. Throws CommError.
void broadcast_values(const std::vector<zero::Parameter>& tensors, int root, comm::Communicator& group);

}  // namespace ds::loops
