#include "compression/sign_device_codec.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

#include "comm/backends/cuda_plugin.h"
#include "compression/sign_codec.h"
#include "core/check.h"
#include "core/device/device_work.h"

namespace ds::compression {
namespace {

int64_t end_of(const ScaleRange& range) { return range.begin + range.length; }

int64_t tiles_of(int64_t numel) { return (numel + kSignTile - 1) / kSignTile; }

const SignDeviceKernels& opened_kernels() {
  comm::cuda_plugin();  // loads libdsengine_cuda, which registers its kernels then
  const auto* kernels = device_functions<SignDeviceKernels>();
  require<ConfigError>(kernels != nullptr,
                       "libdsengine_cuda.so: expected kernels for SignCodec, found none. Build it and ",
                       "libdsengine.so from one source tree");
  return *kernels;
}

}  // namespace

SignDeviceCodec::Tables SignDeviceCodec::tables_on(at::Device device, const SignCodec& codec) {
  const std::lock_guard lock(mutex_);
  Tables& tables = tables_[device.index()];
  if (tables.memory.defined()) return tables;
  const std::vector<ScaleRange>& ranges = codec.ranges();
  std::vector<int64_t> all;
  all.reserve(3 * ranges.size() + static_cast<size_t>(tiles_of(codec.numel())) + 2);
  for (const ScaleRange& range : ranges) all.push_back(range.begin);
  for (const ScaleRange& range : ranges) all.push_back(end_of(range));
  int64_t parts = 0;
  for (const ScaleRange& range : ranges) {
    all.push_back(parts);
    parts += (range.length + kSignPart - 1) / kSignPart;
  }
  all.push_back(parts);
  size_t first = 0;
  for (int64_t tile = 0; tile <= tiles_of(codec.numel()); ++tile) {
    while (first < ranges.size() && end_of(ranges[first]) <= tile * kSignTile) ++first;
    all.push_back(static_cast<int64_t>(first));
  }
  // A copy from memory that is not pinned is over when it returns: streams other than the current one may read it.
  at::Tensor memory = at::tensor(all, at::kLong).to(device);
  tables = {.memory = std::move(memory), .parts = parts};
  return tables;
}

template <class Give>
void SignDeviceCodec::give_work(const SignCodec& codec, const at::Tensor& values, const Give& give) {
  const at::NoGradGuard no_grad;
  const SignDeviceKernels& kernels = opened_kernels();
  const at::Device device = values.device();
  const c10::DeviceGuard guard(device);
  const c10::impl::VirtualGuardImpl impl(device.type());
  const Tables tables = tables_on(device, codec);
  // LibTorch must not give this memory to others before the work is done, though the codec may end before.
  impl.recordDataPtrOnStream(tables.memory.storage().data_ptr(), impl.getStream(device));

  const int64_t count = codec.range_count();
  const auto* table = tables.memory.const_data_ptr<int64_t>();
  const SignDeviceRanges ranges{.begins = table,
                                .ends = table + count,
                                .first_parts = table + 2 * count,
                                .first_ranges = table + 3 * count + 1,
                                .count = count,
                                .parts = tables.parts,
                                .numel = codec.numel()};
  const char* const error = give_to_current_stream(device, [&](void* stream) { return give(kernels, ranges, stream); });
  require_given(error, "SignCodec", device);
}

void SignDeviceCodec::scales(const SignCodec& codec, const at::Tensor& values, const at::Tensor& scales) {
  give_work(codec, values, [&](const SignDeviceKernels& kernels, const SignDeviceRanges& ranges, void* stream) {
    const at::Tensor sums = at::empty({ranges.parts}, values.options().dtype(at::kDouble));
    return kernels.scales(ranges, values.const_data_ptr<float>(), sums.mutable_data_ptr<double>(),
                          scales.mutable_data_ptr<float>(), stream);
  });
}

void SignDeviceCodec::encode(const SignCodec& codec, const at::Tensor& values, const at::Tensor& scales,
                             const at::Tensor& bits) {
  give_work(codec, values, [&](const SignDeviceKernels& kernels, const SignDeviceRanges& ranges, void* stream) {
    return kernels.encode(ranges, values.mutable_data_ptr<float>(), scales.const_data_ptr<float>(),
                          bits.mutable_data_ptr<uint8_t>(), stream);
  });
}

void SignDeviceCodec::decode(const SignCodec& codec, const at::Tensor& bits, const at::Tensor& scales,
                             const at::Tensor& values) {
  give_work(codec, values, [&](const SignDeviceKernels& kernels, const SignDeviceRanges& ranges, void* stream) {
    return kernels.decode(ranges, bits.const_data_ptr<uint8_t>(), scales.const_data_ptr<float>(),
                          values.mutable_data_ptr<float>(), stream);
  });
}

void SignDeviceCodec::add(const SignCodec& codec, const at::Tensor& bits, const at::Tensor& scales,
                          const at::Tensor& values) {
  give_work(codec, values, [&](const SignDeviceKernels& kernels, const SignDeviceRanges& ranges, void* stream) {
    return kernels.add(ranges, bits.const_data_ptr<uint8_t>(), scales.const_data_ptr<float>(),
                       values.mutable_data_ptr<float>(), stream);
  });
}

}  // namespace ds::compression
