// Some numbers of each rank, on all of them.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <string>
#include <vector>

#include "dsengine/comm.h"

namespace ds::comm {

// `own` of rank 0, then that of rank 1, and so on; as many on every rank. `device`: the ranks' own. Collective.
std::vector<int64_t> numbers_of_ranks(Communicator& ranks, c10::Device device, const std::vector<int64_t>& own,
                                      const std::string& label);

}  // namespace ds::comm
