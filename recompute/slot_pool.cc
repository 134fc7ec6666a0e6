#include "recompute/slot_pool.h"

#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <vector>

#include "core/check.h"

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

struct SlotPool::Buffer {
  std::mutex mutex;
  at::Tensor memory;  // [slots, numel]
  std::vector<int64_t> free;
};

SlotPool::Slot SlotPool::take(size_t position, int64_t numel, const at::TensorOptions& options, int64_t slots) {
  std::shared_ptr<Buffer> buffer;
  {
    const std::lock_guard lock(mutex_);
    std::shared_ptr<Buffer>& known = buffers_[{position, numel, options.dtype().toScalarType(), options.device().type(),
                                               options.device().index(), slots}];
    if (!known) {
      known = std::make_shared<Buffer>();
      known->memory = at::empty({slots, numel}, options);
      for (int64_t slot = slots; slot-- > 0;) known->free.push_back(slot);
    }
    buffer = known;
  }
  const std::lock_guard lock(buffer->mutex);
  require(
      !buffer->free.empty(), "checkpoint: input ", position, ": more than ", slots,
      " regions are between their forward and backward; expected at most activation_checkpointing.number_checkpoints "
      "(",
      slots, "); raise it to the number of regions of one forward pass");
  const int64_t slot = buffer->free.back();
  buffer->free.pop_back();
  const auto give_back = [buffer, slot](void*) {
    const std::lock_guard inner(buffer->mutex);
    buffer->free.push_back(slot);
  };
  return {buffer->memory.select(0, slot), std::shared_ptr<void>(buffer.get(), give_back)};
}

std::shared_ptr<HostCopies> SlotPool::copies_on(at::Device device) {
  const std::lock_guard lock(mutex_);
  std::shared_ptr<HostCopies>& copies = copies_[device.index()];
  if (!copies) copies = std::make_shared<HostCopies>(device);
  return copies;
}

}  // namespace ds::recompute
