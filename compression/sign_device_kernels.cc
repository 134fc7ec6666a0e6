#include "compression/sign_device_kernels.h"

#include <atomic>

namespace ds::compression {
namespace {

constinit std::atomic<const SignDeviceKernels*> registered_sign_kernels = nullptr;

}  // namespace

void set_sign_device_kernels(const SignDeviceKernels* kernels) { registered_sign_kernels.store(kernels); }

const SignDeviceKernels* sign_device_kernels() { return registered_sign_kernels.load(); }

}  // namespace ds::compression
