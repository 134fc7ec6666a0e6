// The job that this process has joined: every later initialize() and init_distributed() of the program is of it too.
// Files of comm/job are in namespace ds::engine, since the public init_distributed() is there beside initialize().
#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <memory>
#include <string>

#include "comm/backend.h"
#include "comm/meeting/rendezvous.h"
#include "dsengine/comm.h"
#include "dsengine/init_distributed.h"

namespace ds::engine {

// There is one for each rank of each meeting place that this process is; it stays until the process ends, and with rank
// 0's the store.
// Any thread; calls of one rank come in the same order on all ranks.
class JoinedJob {
 public:
  // Joins the job; the ranks meet the first time. Throws ConfigError beside a LibTorch of another minor version, and
  // what comm::rendezvous() throws.
  static std::shared_ptr<JoinedJob> join(const std::string& init_method, std::chrono::milliseconds timeout);

  explicit JoinedJob(comm::Rendezvous meeting) : meeting_(std::move(meeting)) {}

  const comm::Rendezvous& meeting() const { return meeting_; }
  // A function called for a new group of the ranks, which `meeting` has a store for.
  using Attach = std::function<void(const comm::Rendezvous& meeting, comm::Communicator& ranks)>;
  // Returns the communicator of all ranks on `device` by `backend`: the group of an earlier call where every rank still
  // has it, and has asked for the same; else a new one. Collective. Throws what comm::make_communicator() throws.
  std::shared_ptr<comm::Communicator> ranks(c10::Device device, comm::Backend backend, const Attach& attach);

 private:
  bool all_have(const std::shared_ptr<comm::Communicator>& ranks, int call) const;

  comm::Rendezvous meeting_;
  std::weak_ptr<comm::Communicator> last_;
  c10::Device device_ = c10::kCPU;  // the device of last_
  comm::Backend backend_ = comm::Backend::kAuto;
  int calls_ = 0;
};

// Sets prefix and level of the log, and what signals of failed writes mean, once the rank is known; for
// init_distributed() and join_ranks().
void introduce_rank(const comm::Rendezvous& meeting);
// Notes what get_backend() returns.
void note_transport(const comm::Rendezvous& meeting, c10::Device device, comm::Backend backend);

}  // namespace ds::engine
