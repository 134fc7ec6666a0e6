// An optimizer's exchange of slices (optimizers::SliceExchange), over a communicator.
#pragma once

#include <memory>

#include "dsengine/comm.h"
#include "optim/shard_optimizer.h"

namespace ds::zero {

// Exchanges the slices of all ranks of `communicator`, which outlives the result.
std::shared_ptr<optimizers::SliceExchange> make_slice_exchange(comm::Communicator& communicator);
// Stands in where one slice is the full bucket (stage 0): there are no peers.
std::shared_ptr<optimizers::SliceExchange> make_whole_exchange();

}  // namespace ds::zero
