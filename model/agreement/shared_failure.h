// What one rank does between collectives (reading or writing a file, taking memory) fails on all of them.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <exception>
#include <string>

#include "dsengine/comm.h"

namespace ds::engine {

// Collective. `failure`: this rank's, null when all went well. Throws it; a rank without one gets the number of a rank
// that failed, or -1.
int failed_rank(const std::exception_ptr& failure, c10::Device device, comm::Communicator& world);

// The largest `value` of all ranks. Collective; `label` as of comm::Communicator.
int64_t largest_of_ranks(int64_t value, c10::Device device, comm::Communicator& world, const char* label);

// What an exception says. `failure` is not null.
std::string message_of(const std::exception_ptr& failure);

}  // namespace ds::engine
