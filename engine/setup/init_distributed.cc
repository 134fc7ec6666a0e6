#include "dsengine/init_distributed.h"

#include "comm/backends/cuda_plugin.h"
#include "comm/backends/factory.h"
#include "comm/flight/flight_watch.h"
#include "comm/meeting/rendezvous.h"
#include "core/check.h"
#include "core/log.h"
#include "engine/setup/rank_device.h"

namespace ds::engine {

c10::Device parse_device(const std::string& name) {
  if (name.empty() || name == "cpu") return c10::kCPU;
  require<ConfigError>(name.starts_with("cuda"), ".device: expected cpu, cuda or cuda:N, found \"", name, "\"");
  comm::cuda_plugin();  // loads LibTorch's CUDA half, without which there is no CUDA tensor
  return c10::Device(name);
}

c10::Device device_of_rank(const std::string& name, int local_rank) {
  c10::Device device = parse_device(name);
  if (device.is_cuda() && !device.has_index()) device.set_index(static_cast<c10::DeviceIndex>(local_rank));
  return device;
}

int ranks_per_host(const comm::Rendezvous& meeting) {
  const auto size = static_cast<size_t>(meeting.local_world_size);
  int next = 0;
  for (const std::vector<int>& host : meeting.hosts()) {
    if (host.size() != size) return 1;
    for (const int rank : host) {
      if (rank != next++) return 1;
    }
  }
  return meeting.local_world_size;
}

namespace {

Distributed join(const comm::Rendezvous& meeting, const InitDistributedOptions& options) {
  Distributed result;
  result.local_rank = meeting.local_rank;
  result.ranks_per_host = ranks_per_host(meeting);
  result.device = device_of_rank(options.device, meeting.local_rank);
  log::set_rank(meeting.rank, meeting.world_size);
  result.ranks = comm::make_communicator(meeting, result.device, options.backend);
  comm::watch_flight(meeting, *result.ranks, options.flight);
  return result;
}

}  // namespace

Distributed init_distributed(const InitDistributedOptions& options) {
  return join(comm::rendezvous({.init_method = options.init_method, .timeout = options.timeout}), options);
}

Distributed init_distributed(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
                             const InitDistributedOptions& options) {
  return join(comm::rendezvous(store, rank, world_size, options.timeout), options);
}

}  // namespace ds::engine
