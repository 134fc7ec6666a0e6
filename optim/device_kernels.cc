#include "optim/device_kernels.h"

#include <atomic>

namespace ds::optimizers {
namespace {

constinit std::atomic<const UpdateDeviceKernels*> registered_update_kernels = nullptr;

}  // namespace

void set_update_device_kernels(const UpdateDeviceKernels* kernels) { registered_update_kernels.store(kernels); }

const UpdateDeviceKernels* update_device_kernels() { return registered_update_kernels.load(); }

}  // namespace ds::optimizers
