// optimizers::SliceExchange over a communicator.
#pragma once

#include <memory>

#include "dsengine/comm.h"
#include "optim/shard_optimizer.h"

namespace ds::zero {

// Slices of all ranks of `communicator`, which outlives the result.
std::shared_ptr<optimizers::SliceExchange> make_slice_exchange(comm::Communicator& communicator);
// One slice that is the whole bucket (stage 0): no peers.
std::shared_ptr<optimizers::SliceExchange> make_whole_exchange();

}  // namespace ds::zero
