// The store of a tcp:// or env:// rendezvous.
#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>

#include "comm/meeting/rendezvous_address.h"

namespace ds::comm {

// Opens the store. Rank 0 listens, the others connect as soon as it does: they knock every few milliseconds, as c10d's
// own retry waits whole seconds. Where the launcher listens, all connect. Throws CommError when the port is in use, the
// host name does not resolve or nobody listens at the time limit.
c10::intrusive_ptr<c10d::Store> open_tcp_store(const RendezvousAddress& address, std::chrono::milliseconds timeout);

}  // namespace ds::comm
