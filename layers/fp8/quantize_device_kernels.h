// What quantize.h does on a device, on raw memory: a table of functions that the library of the device registers when
// it is loaded. Torch-free, so that a compiler of kernels reads it.
#pragma once

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

// The table for CUDA devices: null until libdsengine_cuda is loaded. What is set stays for the life of the process.
// Thread safe, also while static objects are made.
void set_quantize_device_kernels(const QuantizeDeviceKernels* kernels);
const QuantizeDeviceKernels* quantize_device_kernels();

}  // namespace ds::fp8
