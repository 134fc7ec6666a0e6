#include "compression/sign_codec.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_div.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/repeat_interleave.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <utility>

#include "compression/kernels/sign_kernels.h"
#include "compression/sign_device_codec.h"
#include "core/check.h"
#include "core/host_threads.h"
#include "core/tensor_check.h"
#include "optim/kernels/square_sum.h"

namespace ds::compression {
namespace {

constexpr int64_t kUnit = 1 << 10;   // threads take whole multiples: 4 KiB of values, 128 bytes of bits
constexpr int64_t kGrain = 1 << 15;  // what a thread takes at least
constexpr int64_t kSumBlock = 1 << 16;
constexpr int64_t kOperatorElements = 1 << 22;  // worked on at a time by operators: bounds their temporaries

// [8], of the bits of a byte.
at::Tensor bit_places(at::Device device) { return at::arange(8, at::TensorOptions(device).dtype(at::kByte)); }

// uint8 [(n + 7) / 8] of n flags.
at::Tensor pack_bits(const at::Tensor& flags) {
  const int64_t padding = (8 - flags.numel() % 8) % 8;
  const at::Tensor ones = at::constant_pad_nd(flags.to(at::kByte), {0, padding}).view({-1, 8});
  return ones.bitwise_left_shift(bit_places(flags.device())).sum(1, /*keepdim=*/false, at::kByte);
}

// bool [n, 8] of n bytes.
at::Tensor unpack_bits(const at::Tensor& bytes) {
  return bytes.unsqueeze(1).bitwise_right_shift(bit_places(bytes.device())).bitwise_and(1).to(at::kBool);
}

bool have_kernels(const at::Tensor& values) { return values.defined() && (values.is_cpu() || values.is_cuda()); }

}  // namespace

// Some elements and their bytes, as operators take them at a time: any number of ranges in a few operators.
struct SignCodec::OperatorBlock {
  at::Tensor values;         // float32 [n], a part of the whole
  at::Tensor bits;           // uint8 [(n + 7) / 8], a part of the whole
  at::Tensor inside;         // uint8, as `bits`: 1 in ranges, 0 in gaps
  at::Tensor scale_of_byte;  // float32 [(n + 7) / 8, 1]

  // What `bytes` stand for, [n]; `gap` between the ranges.
  at::Tensor meaning_of(const at::Tensor& bytes, double gap) const {
    const at::Tensor meaning = at::where(unpack_bits(bytes), scale_of_byte, scale_of_byte.neg());
    return at::where(unpack_bits(inside), meaning, gap).view(-1).narrow(0, 0, values.numel());
  }
};

SignCodec::SignCodec(std::vector<ScaleRange> ranges, int64_t numel)
    : ranges_(std::move(ranges)), numel_(numel), on_devices_(std::make_shared<SignDeviceCodec>()) {
  require(numel >= 0, "SignCodec: expected a number of elements, found ", numel);
  int64_t end = 0;
  int64_t sums = 0;
  for (size_t r = 0; r < ranges_.size(); ++r) {
    const ScaleRange& range = ranges_[r];
    require(range.begin >= end && range.length >= 0 && range.length <= numel - range.begin,
            "SignCodec: expected range ", r, " within elements ", end, " (where the range before it ends) to ", numel,
            ", found ", range.length, " elements from ", range.begin);
    require(range.begin % 8 == 0, "SignCodec: expected range ", r, " to begin at a multiple of 8 elements, found ",
            range.begin, ". Lay the tensor out with gaps between the ranges");
    end = range.begin + range.length;
    first_sums_.push_back(sums);
    if (range.length > 0) sums += (end - 1) / kSumBlock - range.begin / kSumBlock + 1;
  }
  first_sums_.push_back(sums);
}

void SignCodec::require_values(const char* what, const at::Tensor& values, const at::Tensor& scales) const {
  require(values.defined() && values.is_contiguous() && values.scalar_type() == at::kFloat && values.numel() == numel_,
          "SignCodec::", what, ": expected contiguous values, float32 [", numel_, "], found ", describe(values));
  require(scales.defined() && scales.is_contiguous() && scales.scalar_type() == at::kFloat &&
              scales.numel() == range_count() && scales.device() == values.device(),
          "SignCodec::", what, ": expected contiguous scales, float32 [", range_count(), "] on ", values.device(),
          ", found ", describe(scales));
}

void SignCodec::require_bits(const char* what, const at::Tensor& values, const at::Tensor& bits) const {
  require(bits.defined() && bits.is_contiguous() && bits.scalar_type() == at::kByte && bits.numel() == bytes() &&
              bits.device() == values.device(),
          "SignCodec::", what, ": expected contiguous bits, uint8 [", bytes(), "] on ", values.device(), " for ",
          numel_, " values, found ", describe(bits));
}

template <class Body>
void SignCodec::for_each_part(int64_t begin, int64_t end, const Body& body) const {
  const auto ends_before = [](const ScaleRange& range, int64_t at) { return range.begin + range.length <= at; };
  auto range = std::lower_bound(ranges_.begin(), ranges_.end(), begin, ends_before);
  for (; range != ranges_.end() && range->begin < end; ++range) {
    const int64_t first = std::max(begin, range->begin);
    const int64_t last = std::min(end, range->begin + range->length);
    if (first < last) body(first, last - first, range - ranges_.begin());
  }
}

void SignCodec::scales(const at::Tensor& values, const at::Tensor& scales) const {
  if (!have_kernels(values)) return scales_by_operators(values, scales);
  require_values("scales", values, scales);
  if (values.is_cuda()) return on_devices_->scales(*this, values, scales);
  const auto* from = values.const_data_ptr<float>();
  auto* scale = scales.mutable_data_ptr<float>();
  // Of the part of each range in each block: the threads that made them do not matter.
  std::vector<double> sums(static_cast<size_t>(first_sums_.back()));
  for_each_range(values, kSumBlock, kGrain, [&](int64_t begin, int64_t end) {
    for (; begin < end; begin += kSumBlock) {
      for_each_part(begin, std::min(end, begin + kSumBlock), [&](int64_t first, int64_t length, int64_t r) {
        const auto range = static_cast<size_t>(r);
        const int64_t block = begin / kSumBlock - ranges_[range].begin / kSumBlock;
        sums[static_cast<size_t>(first_sums_[range] + block)] =
            optimizers::square_sum(from + first, FloatFormat::kFloat32, length);
      });
    }
  });
  for (size_t r = 0; r < ranges_.size(); ++r) {
    double sum = 0;
    for (int64_t i = first_sums_[r]; i < first_sums_[r + 1]; ++i) sum += sums[static_cast<size_t>(i)];
    const auto length = static_cast<double>(std::max<int64_t>(1, ranges_[r].length));
    scale[r] = static_cast<float>(std::sqrt(sum / length));
  }
}

void SignCodec::encode(const at::Tensor& values, const at::Tensor& scales, const at::Tensor& bits) const {
  if (!have_kernels(values)) return encode_by_operators(values, scales, bits);
  require_values("encode", values, scales);
  require_bits("encode", values, bits);
  if (values.is_cuda()) return on_devices_->encode(*this, values, scales, bits);
  auto* to = values.mutable_data_ptr<float>();
  const auto* scale = scales.const_data_ptr<float>();
  auto* bytes = bits.mutable_data_ptr<uint8_t>();
  for_each_range(values, kUnit, kGrain, [&](int64_t begin, int64_t end) {
    int64_t written = begin / 8;
    for_each_part(begin, end, [&](int64_t first, int64_t length, int64_t r) {
      std::memset(bytes + written, 0, static_cast<size_t>(first / 8 - written));
      encode_signs(to + first, length, scale[r], bytes + first / 8);
      written = (first + length + 7) / 8;
    });
    std::memset(bytes + written, 0, static_cast<size_t>((end + 7) / 8 - written));
  });
}

void SignCodec::decode(const at::Tensor& bits, const at::Tensor& scales, const at::Tensor& values) const {
  if (!have_kernels(values)) return decode_by_operators(bits, scales, values);
  require_values("decode", values, scales);
  require_bits("decode", values, bits);
  if (values.is_cuda()) return on_devices_->decode(*this, bits, scales, values);
  const auto* bytes = bits.const_data_ptr<uint8_t>();
  const auto* scale = scales.const_data_ptr<float>();
  auto* to = values.mutable_data_ptr<float>();
  for_each_range(values, kUnit, kGrain, [&](int64_t begin, int64_t end) {
    int64_t written = begin;
    for_each_part(begin, end, [&](int64_t first, int64_t length, int64_t r) {
      std::fill(to + written, to + first, 0.0F);
      decode_signs(bytes + first / 8, length, scale[r], to + first);
      written = first + length;
    });
    std::fill(to + written, to + end, 0.0F);
  });
}

void SignCodec::add(const at::Tensor& bits, const at::Tensor& scales, const at::Tensor& values) const {
  if (!have_kernels(values)) return add_by_operators(bits, scales, values);
  require_values("add", values, scales);
  require_bits("add", values, bits);
  if (values.is_cuda()) return on_devices_->add(*this, bits, scales, values);
  const auto* bytes = bits.const_data_ptr<uint8_t>();
  const auto* scale = scales.const_data_ptr<float>();
  auto* to = values.mutable_data_ptr<float>();
  for_each_range(values, kUnit, kGrain, [&](int64_t begin, int64_t end) {
    for_each_part(begin, end, [&](int64_t first, int64_t length, int64_t r) {
      add_signs(bytes + first / 8, length, scale[r], to + first);
    });
  });
}

void SignCodec::scales_by_operators(const at::Tensor& values, const at::Tensor& scales) const {
  const at::NoGradGuard no_grad;
  require_values("scales", values, scales);
  if (ranges_.empty()) return;
  std::vector<at::Tensor> parts;
  std::vector<at::Scalar> roots;
  for (const ScaleRange& range : ranges_) {
    parts.push_back(values.view(-1).narrow(0, range.begin, range.length));
    roots.emplace_back(std::sqrt(static_cast<double>(std::max<int64_t>(1, range.length))));
  }
  const std::vector<at::Tensor> norms = at::_foreach_norm(parts, 2, at::kDouble);
  scales.view(-1).copy_(at::stack(at::_foreach_div(norms, roots)));
}

// Bytes side by side that have one scale are one run.
SignCodec::OperatorBlock SignCodec::operator_block(int64_t begin, const at::Tensor& values, const at::Tensor& scales,
                                                   const at::Tensor& bits) const {
  const int64_t end = std::min(numel_, begin + kOperatorElements);
  const int64_t first_byte = begin / 8;
  const int64_t end_byte = (end + 7) / 8;
  std::vector<int64_t> runs;  // of each: bytes, range, bits inside
  const auto add_run = [&](int64_t count, int64_t range, int64_t inside) {
    if (count > 0) runs.insert(runs.end(), {count, range, inside});
  };
  int64_t described = first_byte;
  for_each_part(begin, end, [&](int64_t first, int64_t length, int64_t r) {
    add_run(first / 8 - described, 0, 0);
    add_run(length / 8, r, 0xFF);
    add_run(length % 8 > 0, r, (1 << (length % 8)) - 1);
    described = (first + length + 7) / 8;
  });
  add_run(end_byte - described, 0, 0);
  const at::Tensor table = at::tensor(runs, at::kLong).view({-1, 3}).to(values.device());
  const at::Tensor run_of_byte =
      at::repeat_interleave(table.select(1, 0).contiguous(), std::optional<int64_t>(end_byte - first_byte));
  return {
      .values = values.view(-1).narrow(0, begin, end - begin),
      .bits = bits.view(-1).narrow(0, first_byte, end_byte - first_byte),
      .inside = table.select(1, 2).to(at::kByte).index_select(0, run_of_byte),
      .scale_of_byte = scales.view(-1).index_select(0, table.select(1, 1)).index_select(0, run_of_byte).unsqueeze(1)};
}

void SignCodec::encode_by_operators(const at::Tensor& values, const at::Tensor& scales, const at::Tensor& bits) const {
  const at::NoGradGuard no_grad;
  require_values("encode", values, scales);
  require_bits("encode", values, bits);
  if (ranges_.empty()) return void(bits.zero_());
  for (int64_t begin = 0; begin < numel_; begin += kOperatorElements) {
    const OperatorBlock block = operator_block(begin, values, scales, bits);
    block.bits.copy_(pack_bits(block.values.ge(0)).bitwise_and_(block.inside));
    block.values.sub_(block.meaning_of(block.bits, 0.0));
  }
}

void SignCodec::decode_by_operators(const at::Tensor& bits, const at::Tensor& scales, const at::Tensor& values) const {
  const at::NoGradGuard no_grad;
  require_values("decode", values, scales);
  require_bits("decode", values, bits);
  if (ranges_.empty()) return void(values.zero_());
  for (int64_t begin = 0; begin < numel_; begin += kOperatorElements) {
    const OperatorBlock block = operator_block(begin, values, scales, bits);
    block.values.copy_(block.meaning_of(block.bits, 0.0));
  }
}

void SignCodec::add_by_operators(const at::Tensor& bits, const at::Tensor& scales, const at::Tensor& values) const {
  const at::NoGradGuard no_grad;
  require_values("add", values, scales);
  require_bits("add", values, bits);
  if (ranges_.empty()) return;
  for (int64_t begin = 0; begin < numel_; begin += kOperatorElements) {
    const OperatorBlock block = operator_block(begin, values, scales, bits);
    block.values.add_(block.meaning_of(block.bits, -0.0));  // x + -0 is x, also for -0
  }
}

}  // namespace ds::compression
