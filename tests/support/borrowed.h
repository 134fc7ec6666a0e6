// A communicator of a test as the shared pointer that interfaces take.
#pragma once

#include <memory>

#include "dsengine/comm.h"

namespace ds::test {

// A pointer to `communicator` that owns nothing: the communicator has to outlive it.
inline std::shared_ptr<comm::Communicator> borrowed(comm::Communicator& communicator) {
  return {std::shared_ptr<void>(), &communicator};
}

}  // namespace ds::test
