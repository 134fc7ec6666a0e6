// A module's buffers over the ranks that train it: the same values, or whether they are the same.
#pragma once

#include <torch/nn/module.h>

#include <cstdint>

#include "dsengine/comm.h"

namespace ds::engine {

// Rank 0's values become those of all ranks, in few messages (comm/agreement.h). Graphs that have read a buffer
// stay usable: autograd does not count it as a change. Collective.
void broadcast_buffers(const torch::nn::Module& module, comm::Communicator& ranks);

// Of all values: equal on ranks with equal buffers. 0 for a module without buffers. Waits for the device.
uint64_t digest_of_buffers(const torch::nn::Module& module);

}  // namespace ds::engine
