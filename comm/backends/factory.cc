#include "comm/backends/factory.h"

#include <algorithm>

#include "comm/backends/cuda_plugin.h"
#include "comm/backends/hierarchical_communicator.h"
#include "comm/gloo/gloo_communicator.h"
#include "core/check.h"
#include "core/log.h"

namespace ds::comm {
namespace {

std::string hosts_text(const std::vector<std::vector<int>>& hosts, const Rendezvous& rendezvous) {
  std::string text;
  for (const auto& ranks : hosts) {
    text += cat(text.empty() ? "" : ", ", rendezvous.ranks[ranks.front()].host_name, " (", ranks.size(), ")");
  }
  return text;
}

// Where all ranks share a host the loopback interface is always there and reachable.
std::string interface_of(const Rendezvous& rendezvous, size_t hosts) {
  return hosts == 1 ? "127.0.0.1" : rendezvous.ranks[rendezvous.rank].address;
}

std::shared_ptr<Communicator> make_flat_gloo(const Rendezvous& rendezvous, std::chrono::milliseconds timeout,
                                             const std::string& address) {
  GlooGroup group;
  group.store = rendezvous.store;
  group.rank = rendezvous.rank;
  group.size = rendezvous.world_size;
  group.options.timeout = timeout;
  group.options.address = address;
  group.peers = rendezvous.descriptions();
  return make_gloo_communicator(group);
}

BackendChoice choose_for_cuda(Backend backend, const std::string& ranks) {
  require<ConfigError>(backend != Backend::kShm, "communication_backend: shm carries CPU tensors only, the device is ",
                       "cuda. Use auto, nccl or gloo");
  if (backend == Backend::kGloo)
    return {Transport::kGloo, cat("gloo, as asked: CUDA tensors by way of host memory, ", ranks)};
  return {Transport::kNccl, cat("nccl: CUDA tensors, ", ranks)};
}

}  // namespace

Backend parse_backend(const std::string& name) {
  const auto found = std::find(kBackendNames.begin(), kBackendNames.end(), name);
  require<ConfigError>(found != kBackendNames.end(), "communication_backend: expected auto, gloo, shm or nccl, found '",
                       name, "'");
  return static_cast<Backend>(found - kBackendNames.begin());
}

BackendChoice choose_backend(const Rendezvous& rendezvous, c10::DeviceType device, Backend backend) {
  const bool cuda = device == c10::kCUDA;
  require<ConfigError>(cuda || device == c10::kCPU, "communication: expected device cpu or cuda, found ",
                       c10::DeviceTypeName(device, true));
  require<ConfigError>(cuda || backend != Backend::kNccl, "communication_backend: nccl carries CUDA tensors only, the ",
                       "device is cpu. Use auto, shm or gloo");
  const auto hosts = rendezvous.hosts();
  const std::string ranks = hosts.size() == 1 ? cat("all ", rendezvous.world_size, " ranks on one host")
                                              : cat(rendezvous.world_size, " ranks on ", hosts.size(), " hosts");
  if (cuda && (rendezvous.world_size > 1 || backend != Backend::kAuto)) return choose_for_cuda(backend, ranks);
  if (rendezvous.world_size == 1) return {Transport::kAlone, "none: one rank"};
  require<ConfigError>(backend != Backend::kShm || hosts.size() == 1, "communication_backend: shm joins ranks of one ",
                       "host, found ", hosts.size(), ": ", lazy([&] { return hosts_text(hosts, rendezvous); }),
                       ". Use auto (shared memory inside each host) or gloo");
  if (backend == Backend::kGloo) return {Transport::kGloo, cat("gloo, as asked: ", ranks)};
  if (hosts.size() == 1) {
    return {Transport::kSharedMemory,
            cat("shm", backend == Backend::kShm ? ", as asked" : "", ": CPU tensors, ", ranks)};
  }
  if (is_even(hosts)) {
    return {Transport::kHierarchical, cat("shm inside each host and gloo between them: CPU tensors, ", ranks)};
  }
  const bool single = std::all_of(hosts.begin(), hosts.end(), [](const auto& of_host) { return of_host.size() == 1; });
  return {Transport::kHierarchical,
          cat("gloo: CPU tensors, ", ranks,
              single ? ", one on each" : cat(", not the same number on each: ", hosts_text(hosts, rendezvous)))};
}

std::shared_ptr<Communicator> make_communicator(const Rendezvous& rendezvous, c10::Device device, Backend backend,
                                                std::optional<std::chrono::milliseconds> timeout) {
  const BackendChoice choice = choose_backend(rendezvous, device.type(), backend);
  const auto limit = timeout.value_or(rendezvous.timeout);
  const auto hosts = rendezvous.hosts();
  const std::string address = interface_of(rendezvous, hosts.size());
  if (rendezvous.world_size > 1) log::info("communication: ", choice.reason);
  switch (choice.transport) {
    case Transport::kAlone:
      return make_gloo_communicator({.store = rendezvous.store});
    case Transport::kGloo:
      return make_flat_gloo(rendezvous, limit, address);
    case Transport::kSharedMemory:
    case Transport::kHierarchical:
      return make_placed_communicator({.store = rendezvous.store,
                                       .rank = rendezvous.rank,
                                       .size = rendezvous.world_size,
                                       .hosts = hosts,
                                       .peers = rendezvous.descriptions(),
                                       .address = address,
                                       .timeout = limit});
    case Transport::kNccl:
      return cuda_plugin().make_nccl_communicator({.store = rendezvous.store,
                                                   .rank = rendezvous.rank,
                                                   .size = rendezvous.world_size,
                                                   .device = device,
                                                   .timeout = limit});
  }
  ensure(false, "every transport is made above");
  return nullptr;
}

}  // namespace ds::comm
