#include "dsengine/init_distributed.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

#include "comm/backends/cuda_plugin.h"
#include "comm/backends/factory.h"
#include "comm/flight/flight_watch.h"
#include "comm/job/error_stacks.h"
#include "comm/job/joined_job.h"
#include "comm/job/rank_device.h"
#include "comm/meeting/rendezvous.h"
#include "core/check.h"

namespace ds::engine {

namespace {

std::string version_name(int version) { return cat(version / 1000, ".", version % 1000 / 10); }

// Why CUDA finds no GPU although there is one, as far as it tells.
std::string why_no_gpu() {
  const auto [driver, runtime] = comm::cuda_plugin().versions();
  if (driver == 0) return "there is no NVIDIA driver, or it does not answer (`nvidia-smi` shows it)";
  if (driver / 1000 < runtime / 1000) {
    return cat("the NVIDIA driver is too old: it runs CUDA ", version_name(driver), ", and this LibTorch needs CUDA ",
               version_name(runtime), "; install a newer driver, or a LibTorch for CUDA ", driver / 1000);
  }
  return cat("its driver runs CUDA ", version_name(driver), ", which is new enough for this LibTorch's CUDA ",
             version_name(runtime), ": is the GPU given to this process (`nvidia-smi`, CUDA_VISIBLE_DEVICES, the ",
             "container's devices)?");
}

// A GPU that is there and cannot be used is no reason to train on the CPU in silence.
c10::Device present_device() {
  if (!comm::expects_gpu()) return c10::kCPU;
  constexpr const char* kExpected =
      ".device: a GPU is visible to this process, and is used where no device is asked for, but ";
  constexpr const char* kWayOut =
      ". To train on the CPU of this machine, ask for it: .device = \"cpu\", --device cpu in the example GPT, or "
      "CUDA_VISIBLE_DEVICES=\"\" in the environment";
  try {
    comm::cuda_plugin();
  } catch (const ConfigError& error) {
    throw ConfigError(cat(kExpected, error.what(), kWayOut));
  }
  if (c10::impl::VirtualGuardImpl(c10::kCUDA).deviceCount() == 0) {
    throw ConfigError(cat(kExpected, "CUDA finds none that it can use: ", why_no_gpu(), kWayOut));
  }
  return c10::kCUDA;
}

}  // namespace

c10::Device parse_device(const std::string& name) {
  if (name.empty() || name == "auto") return present_device();
  if (name == "cpu") return c10::kCPU;
  require<ConfigError>(name.starts_with("cuda"), ".device: expected auto, cpu, cuda or cuda:N, found \"", name, "\"");
  comm::cuda_plugin();  // loads LibTorch's CUDA half, without which there is no CUDA tensor
  return c10::Device(name);
}

c10::Device device_of_rank(const std::string& name, int local_rank) {
  c10::Device device = parse_device(name);
  if (!device.is_cuda() || device.has_index()) return device;
  const auto visible = static_cast<int>(c10::impl::VirtualGuardImpl(c10::kCUDA).deviceCount());
  if (visible == 0) throw ConfigError(cat(".device: ", name, ": CUDA finds no GPU that it can use: ", why_no_gpu()));
  require<ConfigError>(visible == 1 || local_rank < visible, ".device: the rank with LOCAL_RANK ", local_rank,
                       " expects ", local_rank + 1, " GPUs, or one of its own, found ", visible,
                       " visible. Start at most one rank per GPU on each host, or widen CUDA_VISIBLE_DEVICES");
  // A launcher that gives each rank its own GPU shows it that one only, as the first (srun --gpus-per-task=1).
  device.set_index(static_cast<c10::DeviceIndex>(visible == 1 ? 0 : local_rank));
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

// All but the group.
Distributed place_in(const comm::Rendezvous& meeting, const InitDistributedOptions& options) {
  introduce_rank(meeting);
  return {.local_rank = meeting.local_rank,
          .ranks_per_host = ranks_per_host(meeting),
          .device = device_of_rank(options.device, meeting.local_rank)};
}

}  // namespace

Distributed init_distributed(const InitDistributedOptions& options) {
  hide_error_stacks();
  const auto job = JoinedJob::join(options.init_method, options.timeout);
  Distributed result = place_in(job->meeting(), options);
  result.ranks = job->ranks(result.device, options.backend, [&](const auto& meeting, comm::Communicator& ranks) {
    comm::watch_flight(meeting, ranks, options.flight);
  });
  return result;
}

Distributed init_distributed(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
                             const InitDistributedOptions& options) {
  hide_error_stacks();
  const comm::Rendezvous meeting = comm::rendezvous(store, rank, world_size, options.timeout);
  Distributed result = place_in(meeting, options);
  result.ranks = comm::make_communicator(meeting, result.device, options.backend);
  note_transport(meeting, result.device, options.backend);
  comm::watch_flight(meeting, *result.ranks, options.flight);
  return result;
}

comm::NamedMesh init_device_mesh(const std::string& device, const std::vector<int>& shape,
                                 const std::vector<std::string>& names, InitDistributedOptions options) {
  options.device = device;
  Distributed job = init_distributed(options);
  return comm::init_device_mesh(std::move(job.ranks), shape, names, job.device);
}

}  // namespace ds::engine
