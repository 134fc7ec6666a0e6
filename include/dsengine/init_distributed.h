// Joining the ranks of a job before there is an engine: deepspeed.init_distributed.
//
//   const auto job = ds::engine::init_distributed();  // env://, as ds-launch sets it
//   job.ranks->all_reduce(tensor, ds::comm::ReduceOp::kAvg).wait();
//
// The communicator is shared by those who hold it, and used from one thread at a time.
//
// The environment variable TORCH_DISTRIBUTED_DEBUG means what it means to LibTorch. INFO: all ranks log what rank 0
// logs. DETAIL: they log debug lines, too, and keep 16384 collectives in the flight record. At every level ranks are
// checked to issue the same collectives. DS_LOG_LEVEL overrides the level of the log. Another value is a ConfigError.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "dsengine/comm.h"
#include "dsengine/device_mesh.h"

namespace c10d {
class Store;
}

namespace ds::engine {

// How the ranks of a job find each other.
struct InitDistributedOptions {
  // "cuda" (the GPU with this rank's number on its host), "cuda:N", "cpu", or "auto" (also when empty): cuda where a
  // GPU is visible, else cpu.
  std::string device;
  std::string init_method = "env://";                            // or "tcp://host:port", "file:///path"
  comm::Backend backend = comm::Backend::kAuto;                  // the key communication_backend
  std::chrono::milliseconds timeout = std::chrono::minutes(10);  // the limit of every wait for other ranks
  comm::FlightWatchOptions flight;  // stall_limit holds until initialize() sets the config's
};

// A job whose ranks have met.
struct Distributed {
  std::shared_ptr<comm::Communicator> ranks;  // all ranks of the job
  int local_rank = 0;                         // this rank's position among the ranks of its host
  int ranks_per_host = 1;                     // where all hosts have as many, consecutive ones; else 1
  c10::Device device = c10::kCPU;             // this rank's device
};

// Joins the ranks of the job. Needed where ranks talk before engine::initialize (zero::Init, a program's own
// collectives), which takes the result as .distributed. Returns once all ranks have come; a world of one returns at
// once, without a socket.
//
// Throws ConfigError where the address, the environment, the device or the backend is wrong, naming the variable or
// part. Throws CommError where rank 0 cannot listen, the host is unknown or does not answer, ranks are missing at the
// time limit (they are listed), a rank was claimed twice, or the ranks disagree on the world size.
Distributed init_distributed(const InitDistributedOptions& options = {});
// Joins the ranks over a store that the caller made and every rank shares (embedding); init_method is ignored.
Distributed init_distributed(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
                             const InitDistributedOptions& options = {});

// Whether this process has joined a job, with init_distributed() or initialize(); it stays so until the process ends.
bool is_initialized();
// Names what carries the collectives of the job that was joined last: "nccl", "gloo", "shm" (ranks of one host),
// "shm+gloo" (shared memory inside hosts, gloo between them), or "none" with one rank. Throws UsageError before a job
// was joined.
std::string get_backend();

// Joins the ranks of the job and makes them a grid: init_device_mesh("cpu", {2, 4}, {"dp", "tp"}), torch's function of
// this name. `device` is this rank's, in place of options.device. Throws what init_distributed and
// comm::init_device_mesh throw. Collective.
comm::NamedMesh init_device_mesh(const std::string& device, const std::vector<int>& shape,
                                 const std::vector<std::string>& names, InitDistributedOptions options = {});

}  // namespace ds::engine
