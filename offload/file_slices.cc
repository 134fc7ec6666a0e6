#include "offload/file_slices.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

#include "core/memory/storage_memory.h"
#include "offload/slice_swapper.h"

namespace ds::offload {
namespace {

int64_t size_in_bytes(const at::Tensor& slice) { return slice.numel() * slice.element_size(); }

}  // namespace

int64_t FileSlices::buffer_bytes(const std::vector<int64_t>& sizes) {
  int64_t largest = 0;
  for (const int64_t size : sizes) largest = std::max(largest, TensorFile::memory_bytes(size));
  return largest;
}

FileSlices::FileSlices(std::unique_ptr<AioFile> file, const std::vector<int64_t>& sizes,
                       std::vector<at::Tensor> buffers, std::shared_ptr<PinnedArena> kept, size_t kept_count,
                       at::Device device)
    : buffers_(std::move(file), sizes, std::move(buffers), device),
      kept_(std::move(kept)),
      kept_left_(kept_count),
      device_(device) {}

void FileSlices::gather_on_device(std::vector<at::Tensor> buffers) {
  const AioFile& file = buffers_.file().file();
  copies_ = std::make_unique<DeviceCopies>(std::make_unique<DeviceFile>(file.descriptor(), file.path(), device_),
                                           std::move(buffers), device_);
}

int64_t FileSlices::index_of(const at::Tensor& slice) const {
  const auto found = index_.find(slice.storage().unsafeGetStorageImpl());
  return found == index_.end() ? -1 : found->second;
}

FilePart FileSlices::part_of(int64_t index, const at::Tensor& slice) const {
  return {buffers_.file().offset(index), TensorFile::memory_bytes(size_in_bytes(slice))};
}

at::Tensor FileSlices::allocate(int64_t numel, at::ScalarType dtype) {
  if (kept_left_ > 0) {
    --kept_left_;
    return kept_ ? kept_->take(numel, dtype) : at::empty({numel}, dtype);
  }
  at::Tensor slice = tensor_without_memory(numel, dtype);
  const auto index = static_cast<int64_t>(slices_.size());
  slices_.push_back(slice);
  index_.emplace(slice.storage().unsafeGetStorageImpl(), index);
  give_storage(slice, c10::DataPtr(buffers_.add(index, size_in_bytes(slice)), at::kCPU), size_in_bytes(slice));
  return slice;
}

void FileSlices::load(const at::Tensor& slice) {
  const int64_t index = index_of(slice);
  if (index < 0) return;
  void* const memory = buffers_.load(index, size_in_bytes(slice));
  if (memory != nullptr) give_storage(slice, c10::DataPtr(memory, at::kCPU), size_in_bytes(slice));
}

void FileSlices::unload(const at::Tensor& slice, bool changed) {
  const int64_t index = index_of(slice);
  if (index < 0) return;
  if (buffers_.unload(index)) take_storage(slice);
  if (!changed) return;
  if (copies_) copies_->drop(index);
  buffers_.write(index);
}

at::Tensor FileSlices::begin_gather(const at::Tensor& slice) {
  const int64_t index = index_of(slice);
  if (!copies_ || index < 0) return SliceStore::begin_gather(slice);
  buffers_.require_intact();
  buffers_.finish_write(index);
  return copies_->take(index, part_of(index, slice)).view(slice.scalar_type()).narrow(0, 0, slice.numel());
}

void FileSlices::end_gather(const at::Tensor& slice) {
  const int64_t index = index_of(slice);
  if (!copies_ || index < 0) return SliceStore::end_gather(slice);
  copies_->give_back(index);
}

void FileSlices::prefetch(const at::Tensor& slice) {
  const int64_t index = index_of(slice);
  if (index < 0 || !buffers_.is_intact()) return;  // load() says what is wrong
  if (!copies_) return buffers_.prefetch(index, size_in_bytes(slice));
  if (buffers_.has_written(index)) copies_->prefetch(index, part_of(index, slice));
}

bool FileSlices::has_room() const { return copies_ ? copies_->has_room() : buffers_.has_room(); }

}  // namespace ds::offload
