// What one rank does between collectives (reading or writing a file, taking memory) fails on all of them.
#pragma once

#include <c10/core/Device.h>

#include <exception>

#include "comm/communicator.h"

namespace ds::engine {

// Collective. `failure`: this rank's, null when all went well. Throws it; a rank without one gets the number of a rank
// that failed, or -1.
int failed_rank(const std::exception_ptr& failure, c10::Device device, comm::Communicator& world);

}  // namespace ds::engine
