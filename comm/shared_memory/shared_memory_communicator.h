// Communicator between ranks of one host through shared memory: ranks as processes, or (thread_group.h) as threads.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "comm/collective.h"
#include "comm/shared_memory/shared_memory_collectives.h"
#include "comm/shared_memory/shared_memory_messages.h"
#include "comm/shared_memory/shared_memory_peers.h"
#include "comm/shared_memory/shared_region.h"
#include "core/task_queue.h"
#include "dsengine/comm.h"

namespace ds::comm {

struct SharedMemoryGroup {
  c10::intrusive_ptr<c10d::Store> store;  // how rank 0 tells the others the name of the memory; not used afterwards
  int rank = 0;
  int size = 1;
  std::string name = "world";  // groups that share a store must have different names
  std::chrono::milliseconds timeout{std::chrono::minutes(30)};
};

// Returns once all ranks of the group, processes of this host, have called it. Throws CommError: no shared memory left
// (with sizes), a rank is missing, or runs elsewhere.
std::shared_ptr<Communicator> make_shared_memory_communicator(const SharedMemoryGroup& group);

// CPU tensors only. Collectives run one after another on a thread of the communicator; sends and receives on another,
// in any order with respect to them. Results of reductions are the same bits on all ranks, whatever the timing.
//
// Every wait has the group's time limit; a rank that dies is noticed within a second. An error names the operation on
// this rank and what the missing ranks did last, reaches all ranks of the group, and ends the communicator: all later
// operations throw it again. Ranks that issue different collectives get CommError naming both.
class SharedMemoryCommunicator final : public Communicator {
 public:
  // How long the destructor lets operations under way go on before it abandons them (the peers then get CommError).
  static constexpr std::chrono::seconds kGrace{1};

  struct Memory {
    std::shared_ptr<SharedRegion> region;        // initialised
    std::shared_ptr<RegionDirectory> directory;  // where new_group finds further regions
    std::string region_name;                     // the beginning of their names
  };
  SharedMemoryCommunicator(int rank, int size, std::string name, Memory memory, std::chrono::milliseconds timeout);
  ~SharedMemoryCommunicator() override;

 protected:
  Work launch(Collective collective) override;
  std::shared_ptr<Communicator> make_group(const std::vector<int>& ranks, const std::string& name) override;

 private:
  friend std::shared_ptr<Communicator> make_shared_memory_communicator(const SharedMemoryGroup& group);

  Work enqueue(Collective collective, uint64_t check = 0);
  void meet(const std::string& label, uint64_t check = 0);
  void require_usable(const Collective& collective) const;
  void fail(const std::string& text);
  std::shared_ptr<SharedRegion> agree_on_region(const std::vector<int>& ranks, const std::string& region_name,
                                                const std::string& label);

  GroupMemory memory_;
  std::shared_ptr<RegionDirectory> directory_;
  const std::string region_name_;
  SharedMemoryPeers peers_;
  int groups_made_ = 0;
  mutable std::mutex mutex_;
  std::string first_error_;  // empty: none
  SharedMemoryCollectives collectives_;
  std::unique_ptr<SharedMemoryMessages> messages_;
  std::unique_ptr<TaskQueue> queue_;
};

}  // namespace ds::comm
