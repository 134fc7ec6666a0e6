// Communicator on the collectives of a c10d backend. Made for NCCL; runs on any backend that has the usual ones.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "dsengine/comm.h"

namespace ds::comm {

// The purpose of a backend of a group.
enum class C10dUse : uint8_t {
  kCollectives,
  kMessages,  // of one direction: from lower ranks to higher ones, or back
};

// A group to be made on a c10d backend.
struct C10dGroup {
  c10::intrusive_ptr<c10d::Store> store;  // subgroups meet in it
  int rank = 0;
  int size = 1;
  std::string name = "world";
  c10::Device device{c10::kCPU};  // device of all tensors
  // Makes the backends of this group and of the groups made from it. The backend of collectives is made with the group,
  // by all ranks together; a backend of messages with this rank's first message, whether or not the others make theirs.
  std::function<c10::intrusive_ptr<c10d::Backend>(const c10::intrusive_ptr<c10d::Store>&, int rank, int size, C10dUse)>
      connect;
  GroupUse use = GroupUse::kAll;
  // The backend averages floating point by itself (NCCL); else the sum is divided in wait().
  bool averages = false;
  // The time limit of operations. The end of a group waits as long for them, but 30 seconds at most.
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
  // Set by the first error of this group or of a group made from it: they have the same ranks to lose.
  std::shared_ptr<std::atomic<bool>> failed = std::make_shared<std::atomic<bool>>(false);
};

// Copies travel as bytes, so every data type works. What the backend cannot reduce is composed: averages of integers
// (sum, then a division towards zero), int16 (as int32), bool (as uint8), and band, bor and bxor on integers
// (all_gather and local operations: W times the memory of the tensor).
//
// wait() orders the current stream after the operation and does not block the host; barrier() does. As in NCCL,
// messages from one rank to another match in the order in which they were issued: with several tags under way, both
// sides must issue them in one order (Note [Messages on NCCL's streams]). A first message between two ranks blocks
// the host, on NCCL, until the other rank comes to it. Errors of the backend become CommError naming operation, label,
// group and rank; a collective of a group for messages is a UsageError.
//
// Its destructor waits, where tensors are on a device, until the device has done what it was given, and shuts the
// backend down. After an error of the backend, in this group or in one that shares its `failed`, or while an exception
// flies, it aborts it; so it does, with a warning, where the device has not come to an end in time.
std::shared_ptr<Communicator> make_c10d_communicator(const C10dGroup& group);

}  // namespace ds::comm
