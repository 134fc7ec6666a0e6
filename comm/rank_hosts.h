// On which hosts the ranks of a group are.
#pragma once

#include <c10/core/Device.h>

#include <vector>

#include "dsengine/comm.h"

namespace ds::comm {

// A number for the host of each rank, in the order of their first ranks: those that share memory have the same.
// `device`: the ranks' own. Collective.
std::vector<int> hosts_of(Communicator& ranks, c10::Device device);

}  // namespace ds::comm
