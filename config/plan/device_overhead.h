// Predicts the memory of a GPU that a rank needs beside what the plan counts: CUDA, NCCL and cuBLAS. Torch-free.
#pragma once

#include <cstdint>

#include "dsengine/plan.h"

namespace ds::engine {

// The context as measured on an H200 with CUDA 13 after steps of a GPT (gpu_bench, "device_bytes_beside_allocator");
// the others as reported of an H100. Fragmentation of LibTorch's allocator comes on top.
inline constexpr int64_t kCudaContextBytes = int64_t{840} << 20;  // with the kernels and the state of cuBLAS and cuDNN
inline constexpr int64_t kNcclGroupBytes = int64_t{100} << 20;    // of a communicator: channels, NVLink's buffers
inline constexpr int64_t kNcclPairBytes = int64_t{20} << 20;      // of one between two ranks
inline constexpr int64_t kCublasWorkspaceBytes = int64_t{32} << 20;  // of a thread and stream that multiplies matrices
inline constexpr int64_t kMultiplyingThreads = 2;                    // forward's and autograd's

struct DeviceOverhead {
  int64_t context = 0;
  int64_t groups = 0;  // communicators of several ranks that a rank belongs to
  int64_t pairs = 0;   // and of two, for messages of a pipeline
  int64_t nccl = 0;    // bytes of both
  int64_t workspaces = 0;
  int64_t total() const { return context + nccl + workspaces; }
};

// Predicts for the rank of the plan that needs most.
DeviceOverhead predict_device_overhead(const Plan& plan);

}  // namespace ds::engine
