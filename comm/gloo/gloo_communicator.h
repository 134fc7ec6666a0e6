// Communicator over TCP connections (gloo), for CPU tensors across hosts, and for CUDA tensors by way of host memory.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <memory>
#include <string>
#include <vector>

#include "comm/gloo/gloo_backend.h"
#include "dsengine/comm.h"

namespace ds::comm {

struct GlooGroup {
  c10::intrusive_ptr<c10d::Store> store;  // shared with the communicator: subgroups meet in it
  int rank = 0;
  int size = 1;
  std::string name = "world";
  GlooOptions options;
  std::vector<std::string> peers;  // who each rank is, for messages ("host7, pid 4711"); may be empty
};

// Connects to all other ranks of the group; returns once every rank has called it (a group of one: at once, without a
// socket or a store). Throws CommError.
//
// Collectives run one after another on a thread of the communicator, as direct exchanges (gloo_exchange.h), with
// results that depend on the inputs alone. send and recv go out at once and pass them. A CUDA tensor is copied to host
// memory when the operation is issued (this waits for the current stream) and back in wait(). An operation that a peer
// does not answer within options.timeout throws CommError, as does one whose peer has gone; the communicator cannot be
// used afterwards. Tags are below 65536. band, bor and bxor on floating point throw UsageError.
std::shared_ptr<Communicator> make_gloo_communicator(const GlooGroup& group);

}  // namespace ds::comm
