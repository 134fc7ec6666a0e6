// The work of quantize.h on a device, on raw memory: a table of functions of the device's library
// (core/device_functions.h). Torch-free, so that a compiler of kernels reads it.
#pragma once

#include "core/device_functions.h"
#include "layers/fp8/quantize_rules.h"

namespace ds::fp8 {

// Each function gives work to `stream` (of the current device, CUDA: a cudaStream_t) and does not wait for it. Arrays
// are in the device's memory and do not overlap. Returns why the work could not be given, or null. Thread safe.
struct QuantizeDeviceKernels {
  // Writes the bits, the inverse [] and the amax, and records it.
  const char* (*whole)(const QuantizeArrays& arrays, const WholeTensor& whole, void* stream) = nullptr;
  // Writes the bits and the inverses [parts].
  const char* (*parts)(const QuantizeArrays& arrays, const MatrixParts& parts, void* stream) = nullptr;
  // [rows, columns] of 8 bits to [columns, rows].
  const char* (*transpose)(const uint8_t* from, int64_t rows, int64_t columns, uint8_t* to, void* stream) = nullptr;
};

}  // namespace ds::fp8
