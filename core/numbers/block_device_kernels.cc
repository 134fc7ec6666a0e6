#include "core/numbers/block_device_kernels.h"

#include <atomic>

namespace ds {
namespace {

constinit std::atomic<const BlockDeviceKernels*> registered_block_kernels = nullptr;

}  // namespace

void set_block_device_kernels(const BlockDeviceKernels* kernels) { registered_block_kernels.store(kernels); }

const BlockDeviceKernels* block_device_kernels() { return registered_block_kernels.load(); }

}  // namespace ds
