// What rank 0 does alone for all ranks (reading or writing a file) fails on all of them.
#pragma once

#include <c10/core/Device.h>

#include <exception>
#include <string>

#include "comm/communicator.h"

namespace ds::engine {

// Collective. `failure` is rank 0's, null when all went well; ignored on other ranks. After a failure rank 0 throws it,
// the others IoError with `message`.
void share_failure_of_rank_zero(const std::exception_ptr& failure, const std::string& message, c10::Device device,
                                comm::Communicator& world);

}  // namespace ds::engine
