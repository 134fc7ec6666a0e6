// The table of the GPU kernels that update slices, on raw memory. The device's library fills it
// (core/device_functions.h), and device_update.h calls it. Torch-free, so that a compiler of kernels reads it.
#pragma once

#include <cstdint>

#include "core/device_functions.h"
#include "optim/kernels/adagrad_kernel.h"
#include "optim/kernels/adam_kernel.h"
#include "optim/kernels/lamb_rules.h"
#include "optim/kernels/lion_kernel.h"
#include "optim/kernels/muon_rules.h"
#include "optim/kernels/sgd_coefficients.h"
#include "optim/kernels/slice_arrays.h"

namespace ds::optimizers {

// One slice: its arrays, in the device's memory, and how long they are. gradient_scale is UpdateScale's.
struct DeviceSlice {
  SliceArrays arrays;
  int64_t numel = 0;
};

// The factor of all gradients of a launch, and whether the launch changes anything.
struct UpdateScale {
  float factor = 1.0F;
  const float* device_factor = nullptr;  // in the device's memory, multiplied in; null: 1
  const float* skip = nullptr;           // in the device's memory; not 0: the launch changes nothing; null: 0
};

// Each function updates `count` slices, each by coefficients of its own, in one pass over their memory and as few
// launches as the arguments of a kernel allow. It gives the work to `stream` (of the current device, CUDA: a
// cudaStream_t) and does not wait for it. `slices` and `coefficients` are in the host's memory and read before it
// returns; arrays of different slices do not overlap. Returns why the work could not be given, or null. Thread safe.
template <class Coefficients>
using DeviceUpdate = const char* (*)(const DeviceSlice* slices, const Coefficients* coefficients, int64_t count,
                                     const UpdateScale& scale, void* stream);

// A run of elements of one parameter in a slice: its arrays alone, with the two running means as states.
struct LambRun {
  DeviceSlice part;
  LambCoefficients coefficients;
  int64_t parameter = 0;  // whose sums are its
};

constexpr int64_t kLambTile = 1 << 12;  // elements of a run that are summed at a time
constexpr int64_t lamb_tiles(int64_t numel) { return (numel + kLambTile - 1) / kLambTile; }

// float64, in the device's memory.
struct LambSums {
  double* tiles = nullptr;       // [lamb_tiles of all runs, 2], which nobody else uses until the work is done
  double* parameters = nullptr;  // [parameters, 2]: squares of weights and of steps before they get their size
};

// The two passes of LAMB, each on `count` runs, otherwise as DeviceUpdate. Sums do not depend on how the device runs.
struct LambDeviceKernels {
  // Moves the means and adds the squares of a run to those of its parameter. Nothing where the step is skipped.
  const char* (*advance)(const LambRun* runs, int64_t count, const UpdateScale& scale, const LambSums& sums,
                         void* stream) = nullptr;
  // Changes the weights by the sums that parameters have by now, of all ranks.
  const char* (*apply)(const LambRun* runs, int64_t count, const UpdateScale& scale, const LambSums& sums,
                       void* stream) = nullptr;
};

// muon_blend, muon_step and lamb take float32 masters and states alone.
struct UpdateDeviceKernels {
  DeviceUpdate<AdamCoefficients> adam = nullptr;  // amsgrad: the same for all slices of a call
  DeviceUpdate<LionCoefficients> lion = nullptr;
  DeviceUpdate<AdagradCoefficients> adagrad = nullptr;
  DeviceUpdate<SgdCoefficients> sgd = nullptr;  // with momentum where slices have a state, all of a call or none
  DeviceUpdate<MuonBlendCoefficients> muon_blend = nullptr;  // into masters, whose values before do not matter
  DeviceUpdate<MuonStepCoefficients> muon_step = nullptr;
  LambDeviceKernels lamb;
};

}  // namespace ds::optimizers
