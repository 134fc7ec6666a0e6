// The work of BlockCodec on a device, on raw memory: a table of functions of the device's library
// (core/device_functions.h). Torch-free, so that a compiler of kernels reads it.
#pragma once

#include <cstdint>

#include "core/device_functions.h"
#include "core/numbers/block_rules.h"

namespace ds {

// Each function gives one kernel to `stream` (of the current device, CUDA: a cudaStream_t) and does not wait for it.
// What it is given by reference is in the host's memory and read before it returns; arrays are in the device's, none
// overlap, encoded ones begin at multiples of four bytes. Returns why the work could not be given, or null. Thread
// safe.
struct BlockDeviceKernels {
  const char* (*encode)(const BlockArrays& arrays, const void* values, uint8_t* encoded, void* stream) = nullptr;
  const char* (*decode_sum)(const BlockArrays& arrays, const BlockParts& parts, void* values, void* stream) = nullptr;
};

}  // namespace ds
