#include "model/agreement/host_room.h"

#include <ATen/ops/empty.h>

#include <array>
#include <cstring>
#include <exception>
#include <vector>

#include "comm/agreement.h"
#include "comm/meeting/host_identity.h"
#include "core/check.h"
#include "core/text_hash.h"

namespace ds::engine {
namespace {

// The need of one rank, as ranks send it to each other in a tensor.
struct RankNeed {
  uint64_t domain = 0;  // a hash
  int64_t bytes = 0;
  std::array<char, 64> host_name{};  // ends with a zero
};
constexpr int64_t kNeedElements = sizeof(RankNeed) / sizeof(int64_t);
static_assert(sizeof(RankNeed) % sizeof(int64_t) == 0);

std::vector<RankNeed> needs_of_ranks(const RankNeed& own, c10::Device device, comm::Communicator& world) {
  std::vector<RankNeed> needs(static_cast<size_t>(world.size()));
  const auto on_host = at::TensorOptions().dtype(at::kLong);
  const at::Tensor sent = at::empty({kNeedElements}, on_host);
  std::memcpy(sent.mutable_data_ptr(), &own, sizeof own);
  const at::Tensor received = at::empty({world.size() * kNeedElements}, on_host.device(device));
  world.all_gather(received, sent.to(device), "host memory that ranks need").wait();
  const at::Tensor arrived = received.to(at::kCPU);
  std::memcpy(needs.data(), arrived.const_data_ptr(), needs.size() * sizeof own);
  return needs;
}

}  // namespace

RankHost host_of_this_rank() { return {comm::shared_memory_domain(), comm::host_name(), offload::host_memory_room()}; }

void require_room_on_hosts(int64_t bytes, const std::string& purpose_and_key, c10::Device device,
                           comm::Communicator& world, const RankHost& host) {
  RankNeed own{.domain = fnv1a(host.domain), .bytes = bytes};
  host.name.copy(own.host_name.data(), own.host_name.size() - 1);
  const std::vector<RankNeed> needs = needs_of_ranks(own, device, world);
  offload::HostMemoryNeed here{.of_process = bytes, .of_host = 0, .ranks = 0};
  for (const RankNeed& need : needs) {
    if (need.domain != own.domain) continue;
    here.of_host += need.bytes;
    ++here.ranks;
  }
  std::exception_ptr failure;
  try {
    offload::require_host_memory(here, purpose_and_key, host.room);
  } catch (...) {
    failure = std::current_exception();
  }
  const int failed = comm::failed_rank(failure, device, world);
  require<ConfigError>(failed < 0, "host memory for ", purpose_and_key, ": host ",
                       failed < 0 ? "" : needs[static_cast<size_t>(failed)].host_name.data(), " has no room for rank ",
                       failed,
                       " and the others there; the message of that rank says how much is missing (this is rank ",
                       world.rank(), " on ", host.name, ")");
}

}  // namespace ds::engine
