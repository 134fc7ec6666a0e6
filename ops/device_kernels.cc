#include "ops/device_kernels.h"

#include <atomic>

namespace ds::ops {
namespace {

constinit std::atomic<const OpsDeviceKernels*> registered_ops_kernels = nullptr;

}  // namespace

void set_ops_device_kernels(const OpsDeviceKernels* kernels) { registered_ops_kernels.store(kernels); }

const OpsDeviceKernels* ops_device_kernels() { return registered_ops_kernels.load(); }

}  // namespace ds::ops
