// Speed of the project's own kernels on a GPU, beside a copy of the same GPU.
#pragma once

#include <c10/core/Device.h>

#include <nlohmann/json.hpp>

namespace ds::bench {

// [{name, bytes, seconds, share_of_copy}]: `bytes` are those that must be read and written, each once; the share is
// their rate over that of a copy from device to device. Of `numel` values. Results are compared with those of
// LibTorch's operators first; throws InternalError where they differ.
nlohmann::ordered_json kernel_speeds(at::Device device, int64_t numel, int rounds);

}  // namespace ds::bench
