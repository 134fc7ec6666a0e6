// A number that ranks have measured, as one for all of them.
#pragma once

#include <c10/core/Device.h>

#include "dsengine/comm.h"

namespace ds::engine {

// The mean of all ranks' values, the same bits on each; where all have the same value, that one. Collective; `label` as
// of comm::Communicator.
double mean_of_ranks(double value, c10::Device device, comm::Communicator& world, const char* label);

}  // namespace ds::engine
