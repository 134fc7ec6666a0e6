#include "core/device/device_work.h"

#include "core/check.h"

namespace ds {

void require_given(const char* error, const char* who, at::Device device) {
  require<ConfigError>(error == nullptr, who, ": expected ", device, " to take a kernel, found: ", error,
                       ". Errors of earlier work on the device show here too. Where it says that there is no kernel ",
                       "image, build libdsengine_cuda for this GPU (-DCMAKE_CUDA_ARCHITECTURES=native)");
}

}  // namespace ds
