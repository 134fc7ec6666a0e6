// What BlockCodec does on a device, on raw memory: a table of functions that the library of the device registers when
// it is loaded. Torch-free, so that a compiler of kernels reads it.
#pragma once

#include <cstdint>

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

// The table for CUDA devices: null until libdsengine_cuda is loaded. What is set stays for the life of the process.
// Thread safe, also while static objects are made.
void set_block_device_kernels(const BlockDeviceKernels* kernels);
const BlockDeviceKernels* block_device_kernels();

}  // namespace ds
