#include "layers/fp8/quantize_on_device.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <cmath>

#include "core/check.h"
#include "core/device/device_work.h"
#include "core/numbers/float_format_of.h"
#include "layers/fp8/quantize_device_kernels.h"
#include "layers/fp8/quantize_rules.h"

namespace ds::fp8 {
namespace {

static_assert(kBlock == kPartLength, "kernels have the blocks of quantize.h");

// With the matrix that is written.
QuantizeArrays arrays_of(const at::Tensor& values, at::ScalarType format, int64_t margin, const Quantized& matrix) {
  return {.format = float_format_of(values.scalar_type()).value(),
          .to = format == kE4M3 ? EightBitFormat::kFourBitExponent : EightBitFormat::kFiveBitExponent,
          .values = values.const_data_ptr(),
          .bits = static_cast<uint8_t*>(matrix.values.mutable_data_ptr()),
          .inverse = matrix.inverse.mutable_data_ptr<float>(),
          .shrink = static_cast<float>(std::ldexp(1.0, -static_cast<int>(margin)))};
}

// give(kernels, stream) on the device of `values`.
template <class Give>
void give_quantize(const at::Tensor& values, const Give& give) {
  const char* const error = give_to_current_stream(
      values.device(), [&](void* stream) { return give(*device_functions<QuantizeDeviceKernels>(), stream); });
  require_given(error, "fp8", values.device());
}

}  // namespace

bool has_quantize_kernels(at::Device device) {
  return device.is_cuda() && device_functions<QuantizeDeviceKernels>() != nullptr;
}

bool quantize_kernels_take(const at::Tensor& values) {
  return has_quantize_kernels(values.device()) && float_format_of(values.scalar_type()).has_value();
}

Measured measured_on_device(const at::Tensor& given, at::ScalarType format, const ScaleChoice& choice) {
  const at::NoGradGuard no_grad;
  const at::Tensor values = given.contiguous();
  const auto floats = values.options().dtype(at::kFloat);
  Measured result{{at::empty(values.sizes(), values.options().dtype(format)), at::empty({}, floats)},
                  at::empty({}, floats)};
  WholeTensor whole{.numel = values.numel(), .covers = choice.covers};
  whole.amax = static_cast<int32_t*>(result.amax.mutable_data_ptr());
  if (choice.stored.defined()) {
    ensure(choice.stored.device() == values.device() && choice.stored.scalar_type() == at::kFloat &&
               choice.stored.numel() == 1,
           "a stored scale is one float32 beside the values");
    whole.stored = choice.stored.const_data_ptr<float>();
  }
  if (choice.record.defined()) {
    ensure(choice.record.device() == values.device() && choice.record.scalar_type() == at::kFloat &&
               choice.record.numel() == 1,
           "a largest magnitude is recorded in one float32 beside the values");
    whole.record = choice.record.mutable_data_ptr<float>();
  }
  const QuantizeArrays arrays = arrays_of(values, format, choice.margin, result.matrix);
  give_quantize(
      values, [&](const QuantizeDeviceKernels& kernels, void* stream) { return kernels.whole(arrays, whole, stream); });
  return result;
}

Quantized parts_on_device(const at::Tensor& values, at::ScalarType format, int64_t margin, int64_t rows_of_block) {
  const at::NoGradGuard no_grad;
  const MatrixParts parts{.rows = values.size(0), .columns = values.size(1), .height = rows_of_block};
  const auto options = values.options();
  Quantized result{at::empty(values.sizes(), options.dtype(format)),
                   at::empty({parts.rows / parts.height, parts.across()}, options.dtype(at::kFloat))};
  const QuantizeArrays arrays = arrays_of(values, format, margin, result);
  give_quantize(
      values, [&](const QuantizeDeviceKernels& kernels, void* stream) { return kernels.parts(arrays, parts, stream); });
  return result;
}

at::Tensor transposed_on_device(const at::Tensor& matrix) {
  const at::NoGradGuard no_grad;
  at::Tensor result = at::empty({matrix.size(1), matrix.size(0)}, matrix.options());
  give_quantize(matrix, [&](const QuantizeDeviceKernels& kernels, void* stream) {
    return kernels.transpose(static_cast<const uint8_t*>(matrix.const_data_ptr()), matrix.size(0), matrix.size(1),
                             static_cast<uint8_t*>(result.mutable_data_ptr()), stream);
  });
  return result;
}

}  // namespace ds::fp8
