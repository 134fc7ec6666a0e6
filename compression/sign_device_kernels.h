// The work of SignCodec on a device, on raw memory: a table of functions of the device's library
// (core/device_functions.h). Torch-free, so that a compiler of kernels reads it.
#pragma once

#include <cstdint>

#include "core/device_functions.h"

namespace ds::compression {

constexpr int64_t kSignTile = 1 << 12;  // elements that threads which share a place in the tables take, a multiple of 8
constexpr int64_t kSignPart = 1 << 14;  // elements of a range that are summed at a time

// The ranges of a codec, in order, for a search on the device. The arrays are in its memory and not owned.
struct SignDeviceRanges {
  const int64_t* begins = nullptr;        // [count], of elements
  const int64_t* ends = nullptr;          // [count]
  const int64_t* first_parts = nullptr;   // [count + 1]: ranges are cut into parts of kSignPart from their begin, the
                                          // last is shorter; parts are counted through all ranges
  const int64_t* first_ranges = nullptr;  // [tiles + 1], tiles from element 0, the last is shorter: the first range
                                          // that ends behind a tile's first element, `count` where none does
  int64_t count = 0;
  int64_t parts = 0;  // in all ranges together
  int64_t numel = 0;
};

// Each function gives work to `stream` (of the current device, CUDA: a cudaStream_t) and does not wait for it: all
// pointers are memory of that device, none overlap, what they hold is compression/sign_codec.h's. Returns why the work
// could not be given, or null. Thread safe.
struct SignDeviceKernels {
  // `sums` is memory for [ranges.parts] that nobody else uses until the work is done.
  const char* (*scales)(const SignDeviceRanges& ranges, const float* values, double* sums, float* scales,
                        void* stream) = nullptr;
  const char* (*encode)(const SignDeviceRanges& ranges, float* values, const float* scales, uint8_t* bits,
                        void* stream) = nullptr;
  const char* (*decode)(const SignDeviceRanges& ranges, const uint8_t* bits, const float* scales, float* values,
                        void* stream) = nullptr;
  const char* (*add)(const SignDeviceRanges& ranges, const uint8_t* bits, const float* scales, float* values,
                     void* stream) = nullptr;
};

}  // namespace ds::compression
