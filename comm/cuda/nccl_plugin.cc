// The entry of libdsengine_cuda, and its communicators on NCCL, as c10d::ProcessGroupNCCL runs it.
#include <c10/cuda/CUDAFunctions.h>
#include <cuda_runtime_api.h>
#include <torch/csrc/cuda/nccl.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include <cstddef>
#include <string>
#include <string_view>

#include "comm/backends/c10d_communicator.h"
#include "comm/backends/cuda_plugin.h"
#include "core/check.h"
#include "core/text.h"
#include "core/without_stack.h"

namespace ds::comm {
namespace {

// Pins host memory that is mapped already, as CudaPlugin::register_host_memory says.
std::string register_host_memory(void* data, size_t bytes) {
  const cudaError_t error = cudaHostRegister(data, bytes, cudaHostRegisterPortable);
  if (error == cudaSuccess) return {};
  cudaGetLastError();  // else the next kernel launch reports it
  return cat("cudaHostRegister: ", cudaGetErrorString(error), " (", cudaGetErrorName(error), ")");
}

// Undoes register_host_memory().
void unregister_host_memory(void* data) {
  if (cudaHostUnregister(data) != cudaSuccess) cudaGetLastError();
}

// c10d's classes hold structures of nccl.h by value: they must be those that libtorch_cuda was built with.
void check_nccl_version() {
  const uint64_t code = torch::cuda::nccl::version();
  const auto major = static_cast<int>(code >> 32);
  const auto minor = static_cast<int>(code >> 16 & 0xffff);
  require<ConfigError>(major == NCCL_MAJOR && minor == NCCL_MINOR, "libdsengine_cuda was built with NCCL ", NCCL_MAJOR,
                       ".", NCCL_MINOR, ", found NCCL ", major, ".", minor,
                       " at run time. Build it with the nccl.h of the LibTorch in use");
}

void check_device(const NcclGroup& group) {
  const int devices = c10::cuda::device_count();
  require<ConfigError>(
      devices > 0, "nccl: rank ", group.rank, " needs ", group.device,
      ", but no usable GPU was found. Look at `nvidia-smi` and CUDA_VISIBLE_DEVICES, or run on the CPU");
  require<ConfigError>(group.device.is_cuda() && group.device.has_index() && group.device.index() < devices,
                       "nccl: rank ", group.rank, " expects a device cuda:0 to cuda:", devices - 1, ", found ",
                       group.device, ". Start at most one rank per GPU on each host");
}

struct NcclPlace {
  int rank;
  int size;
};

c10::intrusive_ptr<c10d::Backend> connect_nccl(const c10::intrusive_ptr<c10d::Store>& store, NcclPlace place,
                                               C10dUse use, const NcclGroup& world) {
  // Work that waits for other ranks goes before what this rank computes beside it.
  auto options = c10d::ProcessGroupNCCL::Options::create(/*is_high_priority_stream=*/true);
  options->timeout = world.timeout;
  options->group_name = world.name;
  try {
    auto group = c10::make_intrusive<c10d::ProcessGroupNCCL>(store, place.rank, place.size, options);
    // Ranks make their groups in one order, here: not in a hook of autograd, whose first operation would do it. What is
    // connected gives messages to the stream of its collectives: Note [Messages on NCCL's streams].
    if (use == C10dUse::kCollectives) group->eagerConnectSingleDevice(world.device);
    return group;
  } catch (const std::exception& error) {
    require<ConfigError>(
        std::string_view(error.what()).find("Duplicate GPU") == std::string_view::npos, "nccl: rank ", place.rank,
        " of ", place.size, " (rank ", world.rank, " of the job, ", world.device.str(),
        ") shares its GPU with another rank, and NCCL takes one rank for each GPU. Start as many ",
        "ranks as there are GPUs (ds-launch without --num_procs does), or set ",
        "\"communication_backend\": \"gloo\", by which ranks can share one. NCCL says: ", without_stack(error.what()));
    throw CommError(cat("nccl: rank ", place.rank, " of ", place.size, " (rank ", world.rank, " of the job, ",
                        world.device.str(), ") could not be set up: ", without_stack(error.what())));
  }
}

CudaVersions cuda_versions() {
  CudaVersions versions;
  if (cudaDriverGetVersion(&versions.driver) != cudaSuccess) versions.driver = 0;
  if (cudaRuntimeGetVersion(&versions.runtime) != cudaSuccess) versions.runtime = 0;
  cudaGetLastError();  // else the next kernel launch reports it
  return versions;
}

std::shared_ptr<Communicator> make_nccl_communicator(const NcclGroup& group) {
  check_nccl_version();
  check_device(group);
  c10::cuda::set_device(group.device.index());
  return make_c10d_communicator({.store = group.store,
                                 .rank = group.rank,
                                 .size = group.size,
                                 .name = group.name,
                                 .device = group.device,
                                 .connect =
                                     [group](const auto& store, int rank, int size, C10dUse use) {
                                       return connect_nccl(store, {rank, size}, use, group);
                                     },
                                 .averages = true,
                                 .timeout = group.timeout});
}

}  // namespace
}  // namespace ds::comm

extern "C" __attribute__((visibility("default"))) const ds::comm::CudaPlugin* dsengine_cuda_plugin() {
  static constexpr ds::comm::CudaPlugin kPlugin{.make_nccl_communicator = ds::comm::make_nccl_communicator,
                                                .register_host_memory = ds::comm::register_host_memory,
                                                .unregister_host_memory = ds::comm::unregister_host_memory,
                                                .versions = ds::comm::cuda_versions};
  return &kPlugin;
}
