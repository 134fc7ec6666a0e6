// Access to libdsengine_cuda: what needs CUDA libraries, opened when the device is cuda.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "dsengine/comm.h"

namespace ds::comm {

// A group to be made on NCCL.
struct NcclGroup {
  c10::intrusive_ptr<c10d::Store> store;
  int rank = 0;
  int size = 1;
  std::string name = "world";
  c10::Device device{c10::kCUDA, 0};  // one device per rank
  std::chrono::milliseconds timeout{std::chrono::minutes(10)};
};

// Versions as CUDA writes them: 12020 is 12.2.
struct CudaVersions {
  int driver = 0;   // the newest CUDA that the driver runs; 0: there is no driver
  int runtime = 0;  // the CUDA of this LibTorch
};

// The functions that the library offers. Both sides are built from this header: `version` says whether it was the same
// one.
struct CudaPlugin {
  static constexpr int kVersion = 3;
  static constexpr const char* kSymbol = "dsengine_cuda_plugin";  // extern "C" const CudaPlugin* dsengine_cuda_plugin()

  int version = kVersion;
  std::shared_ptr<Communicator> (*make_nccl_communicator)(const NcclGroup& group) = nullptr;
  // Pins pages of the host for copies of all devices, from the current device. Returns the error text, or nothing.
  std::string (*register_host_memory)(void* data, size_t bytes) = nullptr;
  void (*unregister_host_memory)(void* data) = nullptr;  // never throws: called by destructors
  CudaVersions (*versions)() = nullptr;
};

// Opens the first library of `paths` that the loader takes. Throws ConfigError that says how to build it when none can
// be loaded (with the loader's reason for each), or when it is of another version. The result is never null and stays
// until the process ends.
const CudaPlugin* open_cuda_plugin(const std::vector<std::string>& paths);

// Opens the library once: the one that the environment variable DS_CUDA_LIBRARY names, else that beside libdsengine,
// else where the system looks. Throws what open_cuda_plugin() throws, and ConfigError where LibTorch has looked for
// CUDA before. Called before main() where the variable is set, or where there is an NVIDIA device that
// CUDA_VISIBLE_DEVICES does not hide, so that LibTorch has not. Thread safe.
const CudaPlugin& cuda_plugin();

// Whether this process is to find a GPU: there is an NVIDIA device, or DS_CUDA_LIBRARY names a library (not "none"),
// and CUDA_VISIBLE_DEVICES does not hide all. Loads nothing.
bool expects_gpu();

// Whether this value of CUDA_VISIBLE_DEVICES (null: it is not set) shows no GPU: CUDA's list ends at the first -1.
bool shows_no_gpu(const char* cuda_visible_devices);

}  // namespace ds::comm
