// The plain arrays that the vector kernels work on, in the host's memory. Torch-free.
//
// The kernels are written with Google Highway and compiled for several instruction sets; the best that the machine has
// is chosen at run time. A kernel makes one pass over the memory and has no temporaries. Arrays need no alignment
// beyond that of their elements. Each element's result depends on that element alone, not on where it lies: any cut of
// a slice into ranges, by any number of threads, gives the same bits.
#pragma once

#include <cstdint>

#include "core/numbers/float_bits.h"

namespace ds::optimizers {

// The arrays of one slice, all of the same length. They do not overlap, and belong to the caller. Arithmetic is in
// float32: an element is read, updated and written once; what is written in another format is rounded to nearest even,
// a NaN stays one.
struct SliceArrays {
  void* master = nullptr;  // weights, updated in place
  void* states[3] = {};    // as the kernel says; those it does not know are null
  const void* gradient = nullptr;
  FloatFormat gradient_type = FloatFormat::kFloat32;
  FloatFormat master_type = FloatFormat::kFloat32;
  FloatFormat state_type = FloatFormat::kFloat32;
  float gradient_scale = 1.0F;  // the gradient is multiplied by it
  void* copy = nullptr;         // also gets the new weights, as the master has them; null: not wanted
  FloatFormat copy_type = FloatFormat::kFloat32;

  // Where they are float32.
  DS_HOST_DEVICE bool is_wide() const {
    return master_type == FloatFormat::kFloat32 && state_type == FloatFormat::kFloat32;
  }
  DS_HOST_DEVICE float* wide_master() const { return static_cast<float*>(master); }
  DS_HOST_DEVICE float* wide_state(int s) const { return static_cast<float*>(states[s]); }
};

}  // namespace ds::optimizers
