#include "layers/fp8/quantize_device_kernels.h"

#include <atomic>

namespace ds::fp8 {
namespace {

constinit std::atomic<const QuantizeDeviceKernels*> registered_quantize_kernels = nullptr;

}  // namespace

void set_quantize_device_kernels(const QuantizeDeviceKernels* kernels) { registered_quantize_kernels.store(kernels); }

const QuantizeDeviceKernels* quantize_device_kernels() { return registered_quantize_kernels.load(); }

}  // namespace ds::fp8
