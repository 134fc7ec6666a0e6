// Chooses and makes the communicator of a job.
#pragma once

#include <c10/core/Device.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "comm/backend.h"
#include "comm/meeting/rendezvous.h"
#include "dsengine/comm.h"

namespace ds::comm {

// Reads "auto", "gloo", "shm" or "nccl". Throws ConfigError naming the key communication_backend for anything else.
Backend parse_backend(const std::string& name);

// The kinds of communicators to choose from.
enum class Transport : uint8_t { kAlone, kGloo, kSharedMemory, kHierarchical, kNccl };

// A choice and why it was made.
struct BackendChoice {
  Transport transport = Transport::kAlone;
  std::string reason;  // "shm: CPU tensors, all 4 ranks on one host"
};

// Chooses how the ranks exchange tensors. Pure. auto: nccl for CUDA; for CPU tensors shared memory where all ranks
// share a host, shared memory inside each host and gloo between them where every host has the same number of ranks (at
// least 2), else gloo. Throws ConfigError naming communication_backend: shm for CUDA tensors or across hosts, nccl for
// CPU tensors.
BackendChoice choose_backend(const Rendezvous& rendezvous, c10::DeviceType device, Backend backend);

// Makes the communicator over all ranks of the rendezvous, named "world"; every rank calls it. Says what it chose by
// log::info. `timeout` limits every wait (default: the rendezvous's). Throws ConfigError where choose_backend() does,
// or when nccl is chosen and libdsengine_cuda cannot be loaded; CommError when the ranks cannot connect.
std::shared_ptr<Communicator> make_communicator(const Rendezvous& rendezvous, c10::Device device,
                                                Backend backend = Backend::kAuto,
                                                std::optional<std::chrono::milliseconds> timeout = std::nullopt);

}  // namespace ds::comm
