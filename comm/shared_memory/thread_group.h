// Ranks as threads of one process: the in-memory communicator. It is the shared-memory communicator on plain memory, so
// a test with it exercises the code that joins processes, under ThreadSanitizer too.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "comm/shared_memory/shared_region.h"
#include "dsengine/comm.h"

namespace ds::comm {

// Makes the handles of a group's ranks; they keep working without it. Thread safe.
class ThreadGroup {
 public:
  explicit ThreadGroup(int world_size, std::chrono::milliseconds timeout = std::chrono::seconds(60),
                       std::string name = "world");

  int size() const { return size_; }
  // To be called once for each rank, from any thread.
  std::shared_ptr<Communicator> communicator(int rank) const;

 private:
  int size_;
  std::chrono::milliseconds timeout_;
  std::string name_;
  std::shared_ptr<ThreadRegionDirectory> directory_;
  std::shared_ptr<SharedRegion> region_;
};

}  // namespace ds::comm
