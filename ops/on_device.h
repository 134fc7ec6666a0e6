// Gives work of an operator to the kernels of a device.
#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>

#include "core/check.h"
#include "core/device/device_work.h"
#include "ops/device_kernels.h"

namespace ds::ops {

// give(kernels, stream) -> why not, or null; with the device of `tensor`, which has kernels, as the current one. Throws
// UsageError that names the operator.
template <class Give>
void on_device(const char* name, const at::Tensor& tensor, const Give& give) {
  const char* const error = give_to_current_stream(
      tensor.device(), [&](void* stream) { return give(*device_functions<OpsDeviceKernels>(), stream); });
  if (error == nullptr) return;
  require(error != std::string_view(kNoKernelImage), name, ": libdsengine_cuda has no kernel image for ",
          tensor.device(), "; build it for this GPU (-DCMAKE_CUDA_ARCHITECTURES=native)");
  throw UsageError(cat(name, ": its kernel could not be started on ", tensor.device(), ": the device reported \"",
                       error, "\", perhaps of an earlier kernel"));
}

}  // namespace ds::ops
