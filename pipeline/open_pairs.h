// Connects the ranks of a pipeline before its first batch.
//
// c10d's NCCL backend makes a communicator of two ranks with their first message, and blocks each of them there until
// the other has come. A schedule, which posts receives ahead of the computing that the other rank waits for, would
// stand still in its first batch. torch.distributed.pipelining exchanges a message at the start for the same reason.
#pragma once

#include <c10/core/Device.h>

#include <vector>

#include "dsengine/comm.h"

namespace ds::pipeline {

// Sends one element each way between all ranks that have neighbouring stages. `rank_of`: of each stage, the same on all
// ranks; `device`: where they talk. Returns when this rank's messages have arrived. Collective over `ranks`. Throws
// CommError.
void open_pairs(const std::vector<int>& rank_of, comm::Communicator& ranks, c10::Device device);

}  // namespace ds::pipeline
