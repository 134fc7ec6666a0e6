// The update of several slices on a device, by the kernels of optim/device_kernels.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "optim/device_kernels.h"
#include "optim/shard_optimizer.h"
#include "optim/step_scale.h"
#include "optim/vector_update.h"

namespace ds::optimizers {

// Whether there are kernels that update this master: of a type that kernels know, on a CUDA device, contiguous.
bool kernels_take(const at::Tensor& master);
// The same for all tensors of an update: states, gradient and copy, too, on the master's device.
bool kernels_take(const SliceTensors& slice);
// The same for kernels that know float32 masters and states alone.
bool wide_kernels_take(const SliceTensors& slice);
// Throws InternalError where `scale` is the device's: the caller works with the host's factor.
void require_host_scale(const StepScale& scale);

// give(scale, stream) of the current stream of `device` -> why the work could not be given, or null. Throws ConfigError
// then.
void give_to_device(at::Device device, const StepScale& scale,
                    const std::function<const char*(const UpdateScale& scale, void* stream)>& give);

// What is given to one call of a kernel.
class DeviceBatch {
 public:
  void add(const SliceTensors& slice);
  bool empty() const { return slices_.empty(); }
  // As give_to_device().
  using Give =
      std::function<const char*(const DeviceSlice* slices, int64_t count, const UpdateScale& scale, void* stream)>;
  void run(const StepScale& scale, const Give& give) const;

 private:
  at::Device device_ = at::kCPU;
  std::vector<DeviceSlice> slices_;
};

// SliceOptimizer::update_all for an optimizer whose rule has a kernel. describe(update) -> {SliceTensors,
// Coefficients}, which checks the update too; one(update) is update_into() of a slice that no kernel takes.
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
