#include "optim/device_update.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <iterator>

#include "core/check.h"
#include "core/device/device_work.h"
#include "core/numbers/float_format_of.h"

namespace ds::optimizers {
namespace {

bool is_array_on(const at::Tensor& tensor, at::Device device) {
  return tensor.device() == device && tensor.is_contiguous();
}

const float* scalar(const at::Tensor& tensor, at::Device device) {
  if (!tensor.defined()) return nullptr;
  ensure(tensor.device() == device && tensor.scalar_type() == at::kFloat && tensor.numel() == 1,
         "what only the device knows of a step is one float32 on the device of its slices");
  return tensor.const_data_ptr<float>();
}

}  // namespace

bool kernels_take(const at::Tensor& master) {
  return master.is_cuda() && master.is_contiguous() && float_format_of(master.scalar_type()).has_value() &&
         device_functions<UpdateDeviceKernels>() != nullptr;
}

bool kernels_take(const SliceTensors& slice) {
  if (!kernels_take(slice.master)) return false;
  const at::Device device = slice.master.device();
  const auto has_known_type = [&](const at::Tensor& tensor) {
    return is_array_on(tensor, device) && float_format_of(tensor.scalar_type()).has_value();
  };
  return has_known_type(slice.gradient) && (!slice.copy.defined() || has_known_type(slice.copy)) &&
         std::all_of(slice.states.begin(), slice.states.end(),
                     [&](const at::Tensor& state) { return !state.defined() || has_known_type(state); });
}

bool wide_kernels_take(const SliceTensors& slice) { return kernels_take(slice) && arrays_of(slice).is_wide(); }

void require_host_scale(const StepScale& scale) {
  ensure(!scale.device_factor.defined() && !scale.skip.defined(),
         "a step whose scale is on the device is one of slices that kernels update");
}

void DeviceBatch::add(const SliceTensors& slice) {
  ensure(slices_.empty() || slice.master.device() == device_, "slices of one update are on one device");
  device_ = slice.master.device();
  slices_.push_back({.arrays = arrays_of(slice), .numel = slice.master.numel()});
}

void DeviceBatch::run(const StepScale& scale, const Give& give) const {
  give_to_device(device_, scale, [&](const UpdateScale& factor, void* stream) {
    return give(slices_.data(), static_cast<int64_t>(slices_.size()), factor, stream);
  });
}

void give_to_device(at::Device device, const StepScale& scale,
                    const std::function<const char*(const UpdateScale& scale, void* stream)>& give) {
  const at::NoGradGuard no_grad;
  const UpdateScale factor{.factor = static_cast<float>(scale.factor),
                           .device_factor = scalar(scale.device_factor, device),
                           .skip = scalar(scale.skip, device)};
  require_given(give_to_current_stream(device, [&](void* stream) { return give(factor, stream); }), "optimizer",
                device);
}

}  // namespace ds::optimizers
