#include "recompute/host_copies.h"

#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace ds::recompute {

TransferStream::Mark HostCopies::keep(const at::Tensor& pinned, const at::Tensor& from) {
  const std::lock_guard lock(mutex_);
  return stream_.copy(pinned, from);
}

at::Tensor HostCopies::bring(const at::Tensor& pinned) {
  const std::lock_guard lock(mutex_);
  at::Tensor result;
  TransferStream::Mark arrived;
  {
    const auto guard = stream_.as_current();  // the memory belongs to this stream, and needs to wait for no other
    result = at::empty(pinned.sizes(), pinned.options().device(device_).pinned_memory(false));
    arrived = stream_.copy_of_kept(result, pinned);
  }
  stream_.wait_on_device(arrived);
  const c10::impl::VirtualGuardImpl impl(device_.type());
  impl.recordDataPtrOnStream(result.storage().data_ptr(), impl.getStream(device_));
  return result;
}

}  // namespace ds::recompute
