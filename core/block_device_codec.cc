#include "core/block_device_codec.h"

#include "core/block_codec.h"
#include "core/block_device_kernels.h"
#include "core/device_work.h"
#include "core/float_format_of.h"

namespace ds {
namespace {

static_assert(BlockCodec::kBlock == kBlockLength, "kernels and codec have one block");

// give(kernels, arrays, stream) on the device of `values`.
template <class Give>
void give_blocks(const at::Tensor& values, int bits, int64_t payload_bytes, const Give& give) {
  const BlockArrays arrays{.format = float_format_of(values.scalar_type()).value(),
                           .bits = bits,
                           .numel = values.numel(),
                           .payload_bytes = payload_bytes};
  const char* const error = give_to_current_stream(
      values.device(), [&](void* stream) { return give(*device_functions<BlockDeviceKernels>(), arrays, stream); });
  require_given(error, "BlockCodec", values.device());
}

}  // namespace

bool block_kernels_take(const at::Tensor& values, size_t parts) {
  return values.defined() && values.is_cuda() && parts <= static_cast<size_t>(kMostBlockParts) &&
         device_functions<BlockDeviceKernels>() != nullptr;
}

void encode_on_device(const at::Tensor& values, int bits, int64_t payload_bytes, const at::Tensor& encoded) {
  give_blocks(values, bits, payload_bytes,
              [&](const BlockDeviceKernels& kernels, const BlockArrays& arrays, void* stream) {
                return kernels.encode(arrays, values.const_data_ptr(), encoded.mutable_data_ptr<uint8_t>(), stream);
              });
}

void decode_sum_on_device(const std::vector<at::Tensor>& parts, int bits, int64_t payload_bytes,
                          const at::Tensor& values, int divisor) {
  BlockParts of{};
  of.count = static_cast<int>(parts.size());
  of.divisor = static_cast<float>(divisor);
  for (size_t i = 0; i < parts.size(); ++i) of.of[i] = parts[i].const_data_ptr<uint8_t>();
  give_blocks(values, bits, payload_bytes,
              [&](const BlockDeviceKernels& kernels, const BlockArrays& arrays, void* stream) {
                return kernels.decode_sum(arrays, of, values.mutable_data_ptr(), stream);
              });
}

}  // namespace ds
