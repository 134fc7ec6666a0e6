#include "core/numbers/block_codec.h"

#include <ATen/TensorIterator.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isfinite.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>

#include "core/check.h"
#include "core/device/device_work.h"
#include "core/numbers/block_device_kernels.h"
#include "core/numbers/block_rules.h"
#include "core/numbers/float_format_of.h"
#include "core/round_up.h"
#include "core/tensor_check.h"

// Loops below are compiled for several instruction sets, of which the loader takes one. All give the same bits: none
// has a product whose rounding could be skipped in a sum, and none reorders a sum.
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define DS_CODEC_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define DS_CODEC_CLONES
#endif

namespace ds {
namespace {

constexpr int64_t kCodecBlock = BlockCodec::kBlock;
// Blocks that one thread takes at least.
constexpr int64_t kGrain = 64;
// Values worked on at a time by operators: bounds their temporaries.
constexpr int64_t kOperatorRows = (int64_t{1} << 22) / kCodecBlock;

using BlockBuffer = std::array<float, kCodecBlock>;

// The largest magnitude's bits, which compare as integers: finite < Inf < NaN.
DS_CODEC_CLONES int32_t largest_magnitude(const float* values, int64_t count) {
  int32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int32_t magnitude = magnitude_bits(values[i]);
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

DS_CODEC_CLONES void quantise_8(const float* values, int64_t count, float scale, uint8_t* codes) {
  for (int64_t i = 0; i < count; ++i) {
    codes[i] = static_cast<uint8_t>(std::bit_cast<uint32_t>(values[i] / scale + kRounder));
  }
}

DS_CODEC_CLONES void quantise_4(const float* values, int64_t count, float scale, uint8_t* codes) {
  const int64_t half = (count + 1) / 2;
  const float* upper = values + half;
  for (int64_t i = 0; i < count / 2; ++i) {
    const uint32_t low = (std::bit_cast<uint32_t>(values[i] / scale + kRounder) + 8) & 15;
    const uint32_t high = (std::bit_cast<uint32_t>(upper[i] / scale + kRounder) + 8) & 15;
    codes[i] = static_cast<uint8_t>(low | (high << 4));
  }
  if (count % 2 == 1) {
    const uint32_t low = (std::bit_cast<uint32_t>(values[half - 1] / scale + kRounder) + 8) & 15;
    codes[half - 1] = static_cast<uint8_t>(low | (kZeroPair & 0xF0));
  }
}

DS_CODEC_CLONES void dequantise_8(const uint8_t* codes, int64_t count, float scale, float* values) {
  for (int64_t i = 0; i < count; ++i) values[i] = static_cast<float>(static_cast<int8_t>(codes[i])) * scale;
}

DS_CODEC_CLONES void dequantise_4(const uint8_t* codes, int64_t count, float scale, float* values) {
  const int64_t half = (count + 1) / 2;
  float* upper = values + half;
  for (int64_t i = 0; i < half; ++i) values[i] = static_cast<float>((codes[i] & 15) - 8) * scale;
  for (int64_t i = 0; i < count - half; ++i) upper[i] = static_cast<float>((codes[i] >> 4) - 8) * scale;
}

DS_CODEC_CLONES void add_to(float* sums, const float* values, int64_t count) {
  for (int64_t i = 0; i < count; ++i) sums[i] += values[i];
}

DS_CODEC_CLONES void divide_by(float* sums, float divisor, int64_t count) {
  for (int64_t i = 0; i < count; ++i) sums[i] /= divisor;
}

DS_CODEC_CLONES void convert(const at::BFloat16* from, float* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<float>(from[i]);
}

// GCC makes vectors of neither at::Half's conversions nor of a choice by ?: between floating-point results.
inline int32_t choose(bool condition, int32_t if_true, int32_t if_false) {
  const int32_t mask = -static_cast<int32_t>(condition);
  return (if_true & mask) | (if_false & ~mask);
}

DS_CODEC_CLONES void convert(const at::Half* from, float* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const int32_t half = from[i].x;
    const int32_t magnitude = (half & 0x7FFF) << 13;
    const int32_t normal =
        magnitude + choose(magnitude >= 0x0F800000, 0x70000000, 0x38000000);  // Inf and NaN: the first
    const auto subnormal = std::bit_cast<int32_t>(static_cast<float>(half & 0x3FF) * 0x1p-24F);
    const int32_t bits = choose(magnitude < 0x00800000, subnormal, normal);
    to[i] = std::bit_cast<float>(static_cast<uint32_t>(bits) | (static_cast<uint32_t>(half & 0x8000) << 16));
  }
}

// As at::BFloat16's constructor does, which clang 16 calls in these clones and defines nowhere.
DS_CODEC_CLONES void convert(const float* from, at::BFloat16* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i].x = c10::detail::round_to_nearest_even(from[i]);
}

// Rounds to the nearest, ties to even, as at::Half does.
DS_CODEC_CLONES void convert(const float* from, at::Half* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const auto bits = std::bit_cast<uint32_t>(from[i]);
    const auto magnitude = static_cast<int32_t>(bits & 0x7FFFFFFF);
    // The sum with 0.5 has multiples of 2^-24, float16's subnormal step, in its low bits.
    const auto subnormal = std::bit_cast<int32_t>(std::bit_cast<float>(magnitude) + 0.5F) - 0x3F000000;
    const int32_t normal = (magnitude - 0x38000000 + 0xFFF + ((magnitude >> 13) & 1)) >> 13;
    const int32_t finite = choose(magnitude < 0x38800000, subnormal, normal);
    const int32_t half = choose(magnitude > 0x7F800000, 0x7E00, choose(magnitude >= 0x477FF000, 0x7C00, finite));
    to[i].x = static_cast<uint16_t>(static_cast<uint32_t>(half) | ((bits >> 16) & 0x8000));
  }
}

// Returns the scale.
float encode_block(const float* values, int64_t count, int bits, uint8_t* codes) {
  const int levels = (1 << (bits - 1)) - 1;
  const float scale = block_scale(largest_magnitude(values, count), levels);
  if (!(scale > 0.0F)) {
    std::memset(codes, bits == 8 ? 0 : kZeroPair, static_cast<size_t>(bits == 8 ? count : (count + 1) / 2));
  } else if (bits == 8) {
    quantise_8(values, count, scale, codes);
  } else {
    quantise_4(values, count, scale, codes);
  }
  return scale;
}

void decode_block(const uint8_t* codes, int64_t count, int bits, float scale, float* values) {
  if (bits == 8) {
    dequantise_8(codes, count, scale, values);
  } else {
    dequantise_4(codes, count, scale, values);
  }
}

// body(begin, end) on ranges of blocks, on LibTorch's threads. The library is compiled without OpenMP, where
// at::parallel_for runs on one; TensorIterator, inside LibTorch, is not. `scales` has one element per block.
template <class Body>
void for_each_block(const at::Tensor& scales, const Body& body) {
  auto iterator = at::TensorIteratorConfig().set_check_mem_overlap(false).add_const_input(scales).build();
  const auto* base = scales.const_data_ptr<float>();
  iterator.for_each(
      [&](char** data, const int64_t* /*strides*/, int64_t columns, int64_t rows) {
        const int64_t begin = reinterpret_cast<const float*>(data[0]) - base;
        body(begin, begin + columns * rows);
      },
      kGrain);
}

template <class T>
void encode_on_cpu(const at::Tensor& values, int bits, uint8_t* codes, const at::Tensor& scales) {
  const T* from = values.const_data_ptr<T>();
  auto* scale = scales.mutable_data_ptr<float>();
  const int64_t numel = values.numel();
  for_each_block(scales, [=](int64_t begin, int64_t end) {
    BlockBuffer buffer;
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = block * kCodecBlock;
      const int64_t count = std::min(kCodecBlock, numel - first);
      const float* block_values = buffer.data();
      if constexpr (std::is_same_v<T, float>) {
        block_values = from + first;
      } else {
        convert(from + first, buffer.data(), count);
      }
      scale[block] = encode_block(block_values, count, bits, codes + first * bits / 8);
    }
  });
}

struct CpuPart {
  const uint8_t* codes;
  const float* scales;
};

template <class T>
void decode_sum_on_cpu(const std::vector<CpuPart>& parts, int bits, const at::Tensor& values, int divisor,
                       const at::Tensor& any_scales) {
  T* to = values.mutable_data_ptr<T>();
  const int64_t numel = values.numel();
  for_each_block(any_scales, [&, to, numel, bits, divisor](int64_t begin, int64_t end) {
    BlockBuffer sum, next;
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = block * kCodecBlock;
      const int64_t count = std::min(kCodecBlock, numel - first);
      float* out = sum.data();
      if constexpr (std::is_same_v<T, float>) out = to + first;
      decode_block(parts[0].codes + first * bits / 8, count, bits, parts[0].scales[block], out);
      for (size_t part = 1; part < parts.size(); ++part) {
        decode_block(parts[part].codes + first * bits / 8, count, bits, parts[part].scales[block], next.data());
        add_to(out, next.data(), count);
      }
      if (divisor != 1) divide_by(out, static_cast<float>(divisor), count);
      if constexpr (!std::is_same_v<T, float>) convert(out, to + first, count);
    }
  });
}

// body(first value, first block, rows, columns) on matrices of whole blocks, then on the short last block.
template <class Body>
void for_each_matrix(int64_t numel, const Body& body) {
  const int64_t whole = numel / kCodecBlock;
  for (int64_t row = 0; row < whole; row += kOperatorRows) {
    body(row * kCodecBlock, row, std::min(kOperatorRows, whole - row), kCodecBlock);
  }
  if (numel % kCodecBlock != 0) body(whole * kCodecBlock, whole, 1, numel % kCodecBlock);
}

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

// Whether there are kernels for tensors on this device, and for so many parts at once.
bool block_kernels_take(const at::Tensor& values, size_t parts = 1) {
  return values.defined() && values.is_cuda() && parts <= static_cast<size_t>(kMostBlockParts) &&
         device_functions<BlockDeviceKernels>() != nullptr;
}

// The functions below work on tensors that BlockCodec has checked, of at least one value, whose integers take
// `payload_bytes`. They return when the current stream has the work, and throw ConfigError where the device does not
// take it.
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

}  // namespace

BlockCodec::BlockCodec(int bits) : bits_(bits) {
  require(bits == 8 || bits == 4, "BlockCodec: expected 8 or 4 bits, found ", bits);
}

int64_t BlockCodec::payload_bytes(int64_t numel) const { return round_up((numel * bits_ + 7) / 8, kScaleBytes); }

void BlockCodec::require_tensors(const char* what, const at::Tensor& values, const at::Tensor& encoded) const {
  require(values.defined() && values.is_contiguous() &&
              (values.scalar_type() == at::kFloat || values.scalar_type() == at::kBFloat16 ||
               values.scalar_type() == at::kHalf),
          what, ": expected contiguous values of float32, bfloat16 or float16, found ", describe(values));
  require(encoded.defined() && encoded.is_contiguous() && encoded.scalar_type() == at::kByte &&
              encoded.numel() == encoded_bytes(values.numel()) && encoded.device() == values.device(),
          what, ": expected contiguous uint8 [", encoded_bytes(values.numel()), "] on ", values.device(), " for ",
          values.numel(), " values of ", bits_, " bits, found ", describe(encoded));
  require(encoded.storage_offset() % kScaleBytes == 0, what,
          ": expected an encoded tensor that begins at a multiple of ", kScaleBytes,
          " bytes of its storage, found an offset of ", encoded.storage_offset());
}

at::Tensor BlockCodec::scales_of(const at::Tensor& encoded, int64_t numel) const {
  return encoded.view(-1).narrow(0, payload_bytes(numel), blocks(numel) * kScaleBytes).view(at::kFloat);
}

void BlockCodec::encode(const at::Tensor& values, const at::Tensor& encoded) const {
  const bool on_device = block_kernels_take(values);
  if (!on_device && (!values.defined() || !values.is_cpu())) return encode_by_operators(values, encoded);
  const at::NoGradGuard no_grad;
  require_tensors("encode", values, encoded);
  const int64_t numel = values.numel();
  if (numel == 0) return;
  if (on_device) return encode_on_device(values, bits_, payload_bytes(numel), encoded);
  auto* codes = encoded.mutable_data_ptr<uint8_t>();
  const int64_t used = (numel * bits_ + 7) / 8;
  std::memset(codes + used, 0, static_cast<size_t>(payload_bytes(numel) - used));
  const at::Tensor scales = scales_of(encoded, numel);
  switch (values.scalar_type()) {
    case at::kFloat:
      return encode_on_cpu<float>(values, bits_, codes, scales);
    case at::kBFloat16:
      return encode_on_cpu<at::BFloat16>(values, bits_, codes, scales);
    default:
      return encode_on_cpu<at::Half>(values, bits_, codes, scales);
  }
}

void BlockCodec::decode_sum(const std::vector<at::Tensor>& parts, const at::Tensor& values, int divisor) const {
  const bool on_device = block_kernels_take(values, parts.size());
  if (!on_device && (!values.defined() || !values.is_cpu())) return decode_sum_by_operators(parts, values, divisor);
  const at::NoGradGuard no_grad;
  require(!parts.empty(), "decode_sum: expected at least one encoded part, found none");
  if (on_device) {
    for (const at::Tensor& part : parts) require_tensors("decode_sum", values, part);
    if (values.numel() == 0) return;
    return decode_sum_on_device(parts, bits_, payload_bytes(values.numel()), values, divisor);
  }
  std::vector<CpuPart> cpu_parts;
  for (const at::Tensor& part : parts) {
    require_tensors("decode_sum", values, part);
    const auto* codes = part.const_data_ptr<uint8_t>();
    cpu_parts.push_back({codes, reinterpret_cast<const float*>(codes + payload_bytes(values.numel()))});
  }
  if (values.numel() == 0) return;
  const at::Tensor scales = scales_of(parts[0], values.numel());
  switch (values.scalar_type()) {
    case at::kFloat:
      return decode_sum_on_cpu<float>(cpu_parts, bits_, values, divisor, scales);
    case at::kBFloat16:
      return decode_sum_on_cpu<at::BFloat16>(cpu_parts, bits_, values, divisor, scales);
    default:
      return decode_sum_on_cpu<at::Half>(cpu_parts, bits_, values, divisor, scales);
  }
}

void BlockCodec::encode_by_operators(const at::Tensor& values, const at::Tensor& encoded) const {
  const at::NoGradGuard no_grad;
  require_tensors("encode", values, encoded);
  const int64_t numel = values.numel();
  if (numel == 0) return;
  const at::Tensor bytes = encoded.view(-1);
  const at::Tensor all_scales = scales_of(encoded, numel);
  const int64_t used = (numel * bits_ + 7) / 8;
  bytes.narrow(0, used, payload_bytes(numel) - used).zero_();
  for_each_matrix(numel, [&](int64_t begin, int64_t first_block, int64_t rows, int64_t columns) {
    const at::Tensor matrix = values.view(-1).narrow(0, begin, rows * columns).view({rows, columns}).to(at::kFloat);
    const at::Tensor largest = at::amax(matrix.abs(), 1, /*keepdim=*/true);
    at::Tensor scale = largest.mul(double{per_level(levels())});
    scale.masked_fill_(largest.lt(double{smallest_magnitude(levels())}), 0.0);
    scale.masked_fill_(at::isfinite(largest).logical_not_(), std::numeric_limits<double>::quiet_NaN());
    all_scales.narrow(0, first_block, rows).copy_(scale.view(-1));
    const at::Tensor coded = scale.gt(0);
    at::Tensor codes = matrix.div(scale.masked_fill(coded.logical_not(), 1.0));
    codes.round_().masked_fill_(coded.logical_not(), 0.0);
    if (bits_ == 8) {
      codes = codes.to(at::kChar).view(at::kByte);
    } else {
      const int64_t half = (columns + 1) / 2;
      codes = codes.add_(8.0).to(at::kByte);
      const at::Tensor high = at::constant_pad_nd(codes.narrow(1, half, columns - half), {0, 2 * half - columns}, 8);
      codes = codes.narrow(1, 0, half).add(high.mul_(16));
    }
    bytes.narrow(0, begin * bits_ / 8, codes.numel()).copy_(codes.view(-1));
  });
}

// The values of full blocks, or of one short block, as float32 [rows, columns].
at::Tensor BlockCodec::integers_of(const at::Tensor& encoded, int64_t begin, int64_t rows, int64_t columns) const {
  const int64_t row_bytes = bits_ == 8 ? columns : (columns + 1) / 2;
  const at::Tensor codes = encoded.view(-1).narrow(0, begin * bits_ / 8, rows * row_bytes).view({rows, row_bytes});
  if (bits_ == 8) return codes.view(at::kChar).to(at::kFloat);
  return at::cat({codes.bitwise_and(15), codes.bitwise_right_shift(4)}, 1)
      .narrow(1, 0, columns)
      .to(at::kFloat)
      .sub_(8.0);
}

void BlockCodec::decode_sum_by_operators(const std::vector<at::Tensor>& parts, const at::Tensor& values,
                                         int divisor) const {
  const at::NoGradGuard no_grad;
  require(!parts.empty(), "decode_sum: expected at least one encoded part, found none");
  for (const at::Tensor& part : parts) require_tensors("decode_sum", values, part);
  // A tensor, since a quotient by a number is a product with its reciprocal on some devices.
  const at::Tensor divisors = at::full({1}, double(divisor), values.options().dtype(at::kFloat));
  for_each_matrix(values.numel(), [&](int64_t begin, int64_t first_block, int64_t rows, int64_t columns) {
    at::Tensor sum;
    for (const at::Tensor& part : parts) {
      const at::Tensor scale = scales_of(part, values.numel()).narrow(0, first_block, rows).unsqueeze(1);
      const at::Tensor next = integers_of(part, begin, rows, columns).mul_(scale);
      sum = sum.defined() ? sum.add_(next) : next;
    }
    if (divisor != 1) sum.div_(divisors);
    values.view(-1).narrow(0, begin, rows * columns).copy_(sum.view(-1));
  });
}

}  // namespace ds
