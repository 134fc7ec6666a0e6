// Joining the ranks of a job before there is an engine: deepspeed.init_distributed.
#pragma once

#include <c10/core/Device.h>

#include <chrono>
#include <memory>
#include <string>

#include "comm/backend.h"
#include "comm/flight/flight_watch.h"
#include "comm/meeting/rendezvous.h"
#include "dsengine/comm.h"

namespace ds::engine {

struct InitDistributedOptions {
  std::string device;                  // "cpu" (also when empty), "cuda" (the one of this rank on its host) or "cuda:N"
  std::string init_method = "env://";  // "tcp://host:port", "file:///path"
  comm::Backend backend = comm::Backend::kAuto;
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
  comm::FlightWatchOptions flight;  // its stall_limit until engine::initialize sets that of the config
};

struct Distributed {
  std::shared_ptr<comm::Communicator> ranks;  // all of the job
  int local_rank = 0;                         // position among those of this host
  int ranks_per_host = 1;                     // where all hosts have as many, consecutive ones; else 1
  c10::Device device = c10::kCPU;
};

// Only needed where ranks talk before engine::initialize (zero::Init, a program's own collectives), which takes the
// result as .distributed. Throws as comm::rendezvous and comm::make_communicator.
Distributed init_distributed(const InitDistributedOptions& options = {});

// "cpu", "cuda" or "cuda:N"; ConfigError naming the option for anything else. Loads LibTorch's CUDA half for CUDA.
c10::Device parse_device(const std::string& name);
int ranks_per_host(const comm::Rendezvous& meeting);  // as in Distributed
// As parse_device; "cuda" is cuda:`local_rank`.
c10::Device device_of_rank(const std::string& name, int local_rank);

}  // namespace ds::engine
