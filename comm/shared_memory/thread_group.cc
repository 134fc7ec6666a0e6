#include "comm/shared_memory/thread_group.h"

#include <utility>

#include "comm/shared_memory/shared_memory_communicator.h"
#include "comm/shared_memory/shared_memory_layout.h"
#include "core/check.h"
#include "core/making_process.h"

namespace ds::comm {

ThreadGroup::ThreadGroup(int world_size, std::chrono::milliseconds timeout, std::string name)
    : size_(world_size),
      timeout_(timeout),
      name_(std::move(name)),
      directory_(std::make_shared<ThreadRegionDirectory>()) {
  require(world_size > 0, "ThreadGroup: expected at least one rank, found ", world_size);
  region_ = SharedRegion::anonymous(GroupMemory::bytes_for(world_size));
  GroupMemory::initialize(*region_, world_size);
}

std::shared_ptr<Communicator> ThreadGroup::communicator(int rank) const {
  return make_shared_where_made<SharedMemoryCommunicator>(
      rank, size_, name_, SharedMemoryCommunicator::Memory{region_, directory_, name_}, timeout_);
}

}  // namespace ds::comm
