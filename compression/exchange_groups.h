// The ranks that a compressed reduction talks to.
#pragma once

#include <memory>

#include "dsengine/comm.h"

namespace ds::compression {

// Two communicators over the same ranks in the same order. Exchanges that begin in start() use `first`, those that
// begin when a Work is waited for use `second`: each sees the same order on every rank, whenever a rank waits.
struct ExchangeGroups {
  std::shared_ptr<comm::Communicator> first;
  std::shared_ptr<comm::Communicator> second;

  int rank() const { return first->rank(); }
  int size() const { return first->size(); }
};

}  // namespace ds::compression
