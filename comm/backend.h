// The ways ranks exchange tensors, as the key communication_backend names them. Torch-free: the config reads it, the
// factory acts on it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace ds::comm {

enum class Backend : uint8_t {
  kAuto,  // by device and hosts: see choose_backend
  kGloo,  // TCP; CPU tensors, and CUDA tensors by way of host memory
  kShm,   // shared memory; CPU tensors of ranks on one host
  kNccl,  // CUDA tensors, one device per rank
};

inline constexpr std::array<const char*, 4> kBackendNames = {"auto", "gloo", "shm", "nccl"};

inline const char* name_of(Backend backend) { return kBackendNames.at(static_cast<size_t>(backend)); }

}  // namespace ds::comm
