// The simulated GPU in the place of libdsengine_cuda (comm/backends/cuda_plugin.h): DS_CUDA_LIBRARY names this library.
#include "comm/backends/cuda_plugin.h"

#include <cstdio>
#include <cstdlib>

#include "comm/backends/c10d_communicator.h"
#include "tests/simulated_gpu/memory.h"
#include "tests/simulated_gpu/nccl.h"
#include "tests/simulated_gpu/reports.h"
#include "tests/simulated_gpu/streams.h"
#include "tests/simulated_gpu/timeline.h"

namespace ds::simulated_gpu {
namespace {

std::shared_ptr<comm::Communicator> make_communicator(const comm::NcclGroup& group) {
  set_device(group.device);
  return comm::make_c10d_communicator(
      {.store = group.store,
       .rank = group.rank,
       .size = group.size,
       .name = group.name,
       .device = group.device,
       .connect =
           [group](const auto& store, int rank, int size, comm::C10dUse use) {
             return connect_nccl(store, {rank, size, use == comm::C10dUse::kCollectives}, group.device, group.timeout);
           },
       .averages = true,
       .timeout = group.timeout});
}

// A program that no test looks into fails by what its streams did.
void fail_with_reports() {
  constexpr int kExitCode = 70;
  const std::vector<std::string> reports = Timeline::instance().take_reports();
  for (const std::string& report : reports) std::fprintf(stderr, "simulated GPU: %s\n", report.c_str());
  if (!reports.empty()) std::_Exit(kExitCode);
}

// DS_SIMULATED_DRIVER: the newest CUDA of the driver.
comm::CudaVersions versions() {
  constexpr int kRuntime = 13000;
  const char* const driver = std::getenv("DS_SIMULATED_DRIVER");
  return {.driver = driver == nullptr ? kRuntime : std::atoi(driver), .runtime = kRuntime};
}

const bool kLooksAtTheEnd = std::atexit(&fail_with_reports) == 0;

}  // namespace
}  // namespace ds::simulated_gpu

extern "C" __attribute__((visibility("default"))) const ds::comm::CudaPlugin* dsengine_cuda_plugin() {
  static constexpr ds::comm::CudaPlugin kPlugin{.make_nccl_communicator = ds::simulated_gpu::make_communicator,
                                                .register_host_memory = ds::simulated_gpu::register_host_memory,
                                                .unregister_host_memory = ds::simulated_gpu::unregister_host_memory,
                                                .versions = ds::simulated_gpu::versions};
  return &kPlugin;
}

extern "C" __attribute__((visibility("default"))) void ds_simulated_gpu_waits(void (*take)(const char*, int64_t)) {
  for (const auto& [what, times] : ds::simulated_gpu::Timeline::instance().take_waits()) take(what.c_str(), times);
}

extern "C" __attribute__((visibility("default"))) void ds_simulated_gpu_reports(void (*take)(const char*)) {
  ds::simulated_gpu::Timeline::instance().wait_for_all();
  for (const std::string& report : ds::simulated_gpu::Timeline::instance().take_reports()) take(report.c_str());
}
