#include "comm/job/joined_job.h"

#include <torch/headeronly/version.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <atomic>
#include <csignal>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "comm/backends/factory.h"
#include "comm/meeting/debug_level.h"
#include "comm/meeting/quiet_store.h"
#include "comm/meeting/rendezvous_address.h"
#include "core/check.h"
#include "core/log.h"
#include "core/torch_version/loaded_torch.h"
#include "core/without_stack.h"
#include "core/write_signals.h"

namespace ds::engine {
namespace {

// Returns a text that tells meeting places apart, and ranks that are threads of one process.
std::string place_of(const comm::RendezvousAddress& address) {
  return cat(address.host, ":", address.port, " ", address.path, " rank ", address.rank, " of ", address.world_size);
}

const char* name_of(comm::Transport transport) {
  switch (transport) {
    case comm::Transport::kAlone:
      return "none";
    case comm::Transport::kGloo:
      return "gloo";
    case comm::Transport::kSharedMemory:
      return "shm";
    case comm::Transport::kHierarchical:
      return "shm+gloo";
    case comm::Transport::kNccl:
      return "nccl";
  }
  return "none";
}

std::atomic<const char*> transport_of_last_job = nullptr;  // null: none was joined

}  // namespace

void note_transport(const comm::Rendezvous& meeting, c10::Device device, comm::Backend backend) {
  transport_of_last_job = name_of(comm::choose_backend(meeting, device.type(), backend).transport);
}

bool is_initialized() { return transport_of_last_job != nullptr; }

std::string get_backend() {
  const char* const name = transport_of_last_job;
  require(name != nullptr, "get_backend: expected a job that was joined, found none; call init_distributed() or ",
          "initialize() before");
  return name;
}

void introduce_rank(const comm::Rendezvous& meeting) {
  let_writes_fail({SIGXFSZ});
  if (meeting.world_size > 1) let_writes_fail({SIGPIPE});
  log::set_rank(meeting.rank, meeting.world_size);
  const comm::DebugLevel level = comm::debug_level(comm::process_environment);
  if (level == comm::DebugLevel::kOff || comm::process_environment("DS_LOG_LEVEL")) return;
  log::set_level(level == comm::DebugLevel::kDetail ? "debug" : "info");
}

std::shared_ptr<JoinedJob> JoinedJob::join(const std::string& init_method, std::chrono::milliseconds timeout) {
  require_same_torch_minor(TORCH_VERSION, loaded_torch_version());
  const comm::RendezvousAddress address = comm::parse_rendezvous(init_method, comm::process_environment);
  if (address.place == comm::MeetingPlace::kAlone) {
    return std::make_shared<JoinedJob>(comm::rendezvous({.init_method = init_method, .timeout = timeout}));
  }
  // Not destroyed: engines of the program may end after everything else.
  static auto& jobs = *new std::map<std::string, std::shared_ptr<JoinedJob>>();
  static auto& mutex = *new std::mutex();
  const std::string place = place_of(address);
  {
    const std::lock_guard lock(mutex);
    const auto known = jobs.find(place);
    if (known != jobs.end()) return known->second;
  }
  // Outside of the lock: other ranks that are threads have to come.
  auto job = std::make_shared<JoinedJob>(comm::rendezvous({.init_method = init_method, .timeout = timeout}));
  const std::lock_guard lock(mutex);
  return jobs.emplace(place, std::move(job)).first->second;
}

std::shared_ptr<comm::Communicator> JoinedJob::ranks(c10::Device device, comm::Backend backend, const Attach& attach) {
  const int call = calls_++;
  std::shared_ptr<comm::Communicator> known;
  if (device == device_ && (backend == backend_ || backend == comm::Backend::kAuto)) known = last_.lock();
  if (call > 0 && meeting_.world_size > 1 && all_have(known, call)) return known;
  comm::Rendezvous meeting = meeting_;
  if (call > 0 && meeting.store) {
    meeting.store = c10::make_intrusive<c10d::PrefixStore>(cat("group ", call), meeting.store);
  }
  auto ranks = comm::make_communicator(meeting, device, backend);
  note_transport(meeting, device, backend);
  attach(meeting, *ranks);
  last_ = ranks;
  device_ = device;
  backend_ = backend;
  return ranks;
}

// An engine of one rank may have ended before that of another.
bool JoinedJob::all_have(const std::shared_ptr<comm::Communicator>& ranks, int call) const {
  const auto key = [call](int rank) { return cat("group ", call, " of rank ", rank); };
  std::vector<std::string> keys;
  for (int rank = 0; rank < meeting_.world_size; ++rank) keys.push_back(key(rank));
  bool all = true;
  try {
    const comm::QuietStore quiet;
    meeting_.store->set(key(meeting_.rank), std::string(ranks ? "1" : "0"));
    meeting_.store->wait(keys, meeting_.timeout);
    for (const std::string& one : keys) all = meeting_.store->get_to_str(one) == "1" && all;
  } catch (const std::exception& error) {
    throw CommError(cat("initialize: the ranks of this job did not all come to their call number ", call + 1,
                        " of initialize() or init_distributed(): ", without_stack(error.what())));
  }
  return all;
}

}  // namespace ds::engine
