#include "zero/kept_slice.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

#include "core/check.h"
#include "core/numbers/block_codec.h"

namespace ds::zero {

KeptSlice::KeptSlice(const at::Tensor& values, int bits, const std::shared_ptr<SliceStore>& store)
    : device_(values.device()),
      bits_(bits),
      store_(store ? store : std::make_shared<SliceStore>(values.device())),
      in_given_store_(store != nullptr) {
  const at::NoGradGuard no_grad;
  const at::Tensor kept = bits_ == 0 ? values : encoded(values);
  slice_ = store_->allocate(kept.numel(), kept.scalar_type());
  slice_.copy_(kept);
  store_->unload(slice_, /*changed=*/true);
}

KeptSlice::KeptSlice(at::Tensor slice)
    : device_(slice.device()), slice_(std::move(slice)), store_(std::make_shared<SliceStore>(device_)) {}

void KeptSlice::use(bool changes, const std::function<void()>& call) const {
  if (!defined()) return call();
  // Gathers that were given to the device may still have to copy the slice that is now to change on the host.
  if (changes && slice_.device() != device_)
    c10::impl::VirtualGuardImpl(device_.type()).getStream(device_).synchronize();
  store_->load(slice_);
  try {
    call();
  } catch (...) {
    try {
      store_->unload(slice_, changes);
    } catch (const Error&) {  // the failure that led here is the one to report
    }
    throw;
  }
  store_->unload(slice_, changes);
}

void KeptSlice::write(const at::Tensor& values) {
  const at::NoGradGuard no_grad;
  use(/*changes=*/true, [&] { slice_.copy_(bits_ == 0 ? values : encoded(values)); });
}

at::Tensor KeptSlice::encoded(const at::Tensor& values) const {
  const BlockCodec codec(bits_);
  at::Tensor bytes = at::empty({codec.encoded_bytes(values.numel())}, values.options().dtype(at::kByte));
  codec.encode(values, bytes);
  return bytes;
}

}  // namespace ds::zero
