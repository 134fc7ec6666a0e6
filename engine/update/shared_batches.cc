#include "engine/update/shared_batches.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/bitwise_right_shift.h>
#include <ATen/ops/zeros.h>

#include "core/device/readback.h"
#include "core/text.h"
#include "core/text_hash.h"
#include "zero/value_digest.h"

namespace ds::engine {
namespace {

constexpr int64_t kBatchFactor = 0x9E3779B1;  // odd: batches that have changed places differ
constexpr int64_t kSharedBits = 0xFFFFFFFF;

}  // namespace

void SharedDigest::put(const at::Tensor& number) const {
  const at::NoGradGuard no_grad;
  if (value.defined()) number.copy_(value * factor);
}

uint64_t SharedDigest::number() const { return static_cast<uint64_t>(value.item<double>()); }

void SharedBatches::note(const at::Tensor& whole) {
  const at::NoGradGuard no_grad;
  noted_ = true;
  const auto shape = static_cast<int64_t>(fnv1a(cat(c10::toString(whole.scalar_type()), whole.sizes())) >> 32);
  const bool by_value = whole.layout() == at::kStrided && !whole.is_floating_point() && !whole.is_complex();
  // Numbers that ranks have computed may differ in their last bits.
  const at::Tensor values = by_value && whole.numel() > 0
                                ? zero::device_checksum_of(whole)
                                : at::zeros({}, whole.options().dtype(at::kLong).layout(at::kStrided));
  const at::Tensor own = at::bitwise_right_shift(values, 32).bitwise_xor(values).bitwise_and(kSharedBits) + shape;
  digest_ = digest_.defined() ? digest_.to(own.device()) * kBatchFactor + own : own;
}

SharedDigest SharedBatches::take(const comm::Communicator* ranks, at::Device device) {
  if (ranks == nullptr) return {};
  const at::NoGradGuard no_grad;
  at::Tensor value = digest_.defined() ? digest_ : at::zeros({}, at::kLong);
  digest_.reset();
  value = value.bitwise_and(kSharedBits).to(at::kDouble);
  return {.value = value.is_cpu() ? sent_to(device, value) : value.to(device),
          .factor = ranks->rank() == 0 ? ranks->size() - 1.0 : -1.0};
}

}  // namespace ds::engine
