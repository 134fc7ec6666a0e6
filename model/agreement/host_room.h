// Checks host memory that ranks are about to take, on all of them together.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <string>

#include "dsengine/comm.h"
#include "offload/host_budget.h"

namespace ds::engine {

// The host of a rank.
struct RankHost {
  std::string domain;  // equal on ranks that take from the same memory
  std::string name;    // the host's name, for messages
  offload::HostMemoryRoom room;
};

RankHost host_of_this_rank();

// Checks that each host has room for `bytes` of each of its ranks. Throws ConfigError, on every rank, when the ranks of
// one host have no room for what they need together; `bytes` may differ from rank to rank, as may the numbers of ranks
// on the hosts. On ranks of other hosts the text names the host and a rank there. `purpose_and_key` is that of
// offload::require_host_memory. Collective over `world`: call it before any rank takes its part.
void require_room_on_hosts(int64_t bytes, const std::string& purpose_and_key, c10::Device device,
                           comm::Communicator& world, const RankHost& host = host_of_this_rank());

}  // namespace ds::engine
