// A module's buffers over the ranks that train it: the same values, or whether they are the same.
#pragma once

#include <torch/nn/module.h>

#include <cstdint>

#include "dsengine/comm.h"

namespace ds::engine {

// Overwrites the buffers of all ranks with rank 0's, in few messages (comm/agreement.h). Graphs that have read a buffer
// stay usable: autograd does not count it as a change. Collective.
void broadcast_buffers(const torch::nn::Module& module, comm::Communicator& ranks);

// Returns a digest of all values: equal on ranks with equal buffers. 0 for a module without buffers. Waits for the
// device.
uint64_t digest_of_buffers(const torch::nn::Module& module);

}  // namespace ds::engine
