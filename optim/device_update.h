// The update of several slices on a GPU in one launch, by the kernels of optim/device_kernels.h.
//
// It serves SliceOptimizer::update_all(). Single slices and slices on a CPU are updated by cpu_update.h, and dtypes
// that no kernel knows by chunked_update.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "optim/cpu_update.h"
#include "optim/device_kernels.h"
#include "optim/shard_optimizer.h"
#include "optim/step_scale.h"

namespace ds::optimizers {

// Whether kernels can update this master: its dtype is one that they know, it is on a CUDA device, and contiguous.
bool kernels_take(const at::Tensor& master);
// Whether kernels can update this slice: its master, states, gradient and copy, all on one device.
bool kernels_take(const SliceTensors& slice);
// Whether kernels that know only float32 masters and states can update this slice.
bool wide_kernels_take(const SliceTensors& slice);
// Throws InternalError where `scale` has numbers that only the device knows: the caller works with the host's factor.
void require_host_scale(const StepScale& scale);

// Calls give(scale, stream) with the current stream of `device`. It returns why the work could not be given, or null.
// Throws ConfigError with that reason.
void give_to_device(at::Device device, const StepScale& scale,
                    const std::function<const char*(const UpdateScale& scale, void* stream)>& give);

// The slices that one call of a kernel updates.
class DeviceBatch {
 public:
  void add(const SliceTensors& slice);
  bool empty() const { return slices_.empty(); }
  // Calls the kernel, and returns why the work could not be given, or null.
  using Give =
      std::function<const char*(const DeviceSlice* slices, int64_t count, const UpdateScale& scale, void* stream)>;
  void run(const StepScale& scale, const Give& give) const;

 private:
  at::Device device_ = at::kCPU;
  std::vector<DeviceSlice> slices_;
};

// Implements SliceOptimizer::update_all() for an optimizer that has a kernel. `describe` checks an update and returns
// its SliceTensors and Coefficients; `one` makes the update of a slice that no kernel takes.
template <class Coefficients, class Describe, class One>
void update_together(const std::vector<SliceUpdate>& updates, const StepScale& scale,
                     DeviceUpdate<Coefficients> UpdateDeviceKernels::*kernel, const Describe& describe,
                     const One& one) {
  DeviceBatch batch;
  std::vector<Coefficients> coefficients;
  for (const SliceUpdate& update : updates) {
    const std::pair<SliceTensors, Coefficients> described = describe(update);
    if (kernels_take(described.first)) {
      batch.add(described.first);
      coefficients.push_back(described.second);
    } else {
      require_host_scale(scale);
      one(update);
    }
  }
  if (batch.empty()) return;
  batch.run(scale, [&](const DeviceSlice* slices, int64_t count, const UpdateScale& factor, void* stream) {
    return (device_functions<UpdateDeviceKernels>()->*kernel)(slices, coefficients.data(), count, factor, stream);
  });
}

}  // namespace ds::optimizers
