// Operators on a device, on raw memory: a table of functions of the device's library (core/device_functions.h).
// Torch-free, so that a compiler of kernels reads it.
#pragma once

#include <cstdint>

#include "core/device_functions.h"
#include "ops/kernels/norm_kernel.h"
#include "ops/kernels/rope_kernel.h"
#include "ops/kernels/swiglu_rules.h"

namespace ds::ops {

// Rows of a backward pass of norms in blocks of `length` rows. Block b adds its gradients of weight and bias, from
// zero, in row b of [blocks, size] at NormBackward's weight_gradient and bias_gradient.
struct NormBlocks {
  int64_t rows = 0;
  int64_t blocks = 0;
  int64_t length = 0;
};

// Why work could not be given: the library was built for other devices.
inline constexpr const char* kNoKernelImage = "it has no kernel image for this device";

// Each function gives the work to `stream` (of the current device, CUDA: a cudaStream_t) and does not wait for it. What
// it is given is in the host's memory and read before it returns; arrays are in the device's. Returns null, or why
// the work could not be given: kNoKernelImage, or what the device reported, perhaps of something before. Thread safe.
struct OpsDeviceKernels {
  const char* (*norm_forward)(const NormForward& norm, int64_t rows, void* stream) = nullptr;
  const char* (*norm_backward)(const NormBackward& norm, const NormBlocks& blocks, void* stream) = nullptr;
  const char* (*swiglu_forward)(const SwigluForward& arrays, const RowsOf& rows, void* stream) = nullptr;
  const char* (*swiglu_backward)(const SwigluBackward& arrays, const RowsOf& rows, void* stream) = nullptr;
  const char* (*rope)(const RopeRows& rows, void* stream) = nullptr;
  // 10 * major + minor of a device, as 90; 0 where it cannot be asked.
  int (*compute_capability)(int device) = nullptr;
};

}  // namespace ds::ops
