// The one place that names c10d::ProcessGroupGloo.
#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <string>

namespace ds::comm {

struct GlooOptions {
  std::chrono::milliseconds timeout{std::chrono::minutes(5)};
  // Address or host name of the network interface this rank listens on. Empty: $GLOO_SOCKET_IFNAME where set, else the
  // address this machine's host name resolves to. "127.0.0.1" where all ranks share a host.
  std::string address;
  // Connect two ranks when they first talk to each other, not all of them at the start.
  bool lazy = false;
};

// Connects this rank to all others (a full mesh of TCP connections, addresses exchanged through `store`), so it returns
// once every rank of the group has called it. Throws CommError naming the rank and the cause.
c10::intrusive_ptr<c10d::Backend> connect_gloo(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                               const GlooOptions& options);

}  // namespace ds::comm
