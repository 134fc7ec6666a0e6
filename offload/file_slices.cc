#include "offload/file_slices.h"

#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

#include "core/log.h"
#include "core/memory/storage_memory.h"
#include "core/without_stack.h"
#include "offload/slice_swapper.h"

namespace ds::offload {
namespace {

int64_t size_in_bytes(const at::Tensor& slice) { return slice.numel() * slice.element_size(); }

}  // namespace

SliceBuffers::SliceBuffers(std::unique_ptr<AioFile> file, const std::vector<int64_t>& sizes,
                           std::vector<at::Tensor> buffers, at::Device device)
    : file_(std::move(file), sizes), device_(device) {
  ensure(!buffers.empty(), "slices are read into at least one buffer");
  for (at::Tensor& buffer : buffers) buffers_.push_back({.memory = std::move(buffer)});
}

SliceBuffers::~SliceBuffers() {
  for (Buffer& buffer : buffers_) {
    try {
      settle(buffer);
    } catch (const std::exception& error) {
      log::warning("slices of parameters: ", without_stack(error.what()));
    }
  }
}

void* SliceBuffers::add(int64_t slice, int64_t bytes) {
  Buffer& buffer = take(slice, bytes);
  buffer.loads = 1;
  return buffer.memory.data_ptr();
}

void* SliceBuffers::load(int64_t slice, int64_t bytes) {
  require_intact();
  Buffer* buffer = find(slice);
  if (!buffer) {
    buffer = &take(slice, bytes);
    start(*buffer, /*writes=*/false);
  }
  settle(*buffer);  // waits for a write too: the values that it writes must not change
  buffer->last_use = ++uses_;
  return buffer->loads++ > 0 ? nullptr : buffer->memory.data_ptr();
}

bool SliceBuffers::unload(int64_t slice) {
  Buffer* const buffer = find(slice);
  ensure(buffer != nullptr && buffer->loads > 0, "a slice is unloaded as often as it was loaded");
  return --buffer->loads == 0;
}

void SliceBuffers::note_copies(int64_t slice) {
  Buffer* const buffer = find(slice);
  if (device_.is_cpu() || buffer == nullptr) return;
  // Copies to the device only read the buffer: they do not keep the host waiting before another slice needs it.
  buffer->copied = std::make_shared<c10::Event>(device_.type());
  buffer->copied->record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
}

void SliceBuffers::write(int64_t slice) {
  Buffer* const buffer = find(slice);
  ensure(buffer != nullptr, "a slice is written from the buffer that holds it");
  settle(*buffer);
  start(*buffer, /*writes=*/true);
}

void SliceBuffers::prefetch(int64_t slice, int64_t bytes) {
  const auto is_free = [](const Buffer& buffer) { return buffer.loads == 0; };
  if (find(slice) || std::count_if(buffers_.begin(), buffers_.end(), is_free) < 2) return;
  start(take(slice, bytes), /*writes=*/false);
}

bool SliceBuffers::has_room() const {
  return std::any_of(buffers_.begin(), buffers_.end(), [](const Buffer& buffer) { return buffer.loads == 0; });
}

void SliceBuffers::finish_write(int64_t slice) {
  if (Buffer* const buffer = find(slice); buffer != nullptr && buffer->writes) settle(*buffer);
}

bool SliceBuffers::has_written(int64_t slice) {
  Buffer* const buffer = find(slice);
  if (buffer == nullptr || !buffer->under_way || !buffer->writes) return true;
  try {
    if (!file_.done(buffer->ticket)) return false;
    settle(*buffer);
  } catch (const IoError&) {
    return false;
  }
  return true;
}

SliceBuffers::Buffer* SliceBuffers::find(int64_t slice) {
  for (Buffer& buffer : buffers_) {
    if (buffer.slice == slice) return &buffer;
  }
  return nullptr;
}

SliceBuffers::Buffer& SliceBuffers::take(int64_t slice, int64_t bytes) {
  Buffer* oldest = nullptr;
  for (Buffer& buffer : buffers_) {
    if (buffer.loads == 0 && (!oldest || buffer.last_use < oldest->last_use)) oldest = &buffer;
  }
  ensure(oldest != nullptr, "slices are loaded as long as there are buffers");
  settle(*oldest);
  if (oldest->copied) std::exchange(oldest->copied, nullptr)->synchronize();
  oldest->slice = slice;
  oldest->bytes = bytes;
  oldest->last_use = ++uses_;
  return *oldest;
}

void SliceBuffers::start(Buffer& buffer, bool writes) {
  buffer.writes = writes;
  const at::Tensor contents = buffer.memory.narrow(0, 0, buffer.bytes);
  try {
    buffer.ticket = writes ? file_.start_write(buffer.slice, contents) : file_.start_read(buffer.slice, contents);
  } catch (const IoError& error) {
    fail(buffer, error);
  }
  buffer.under_way = true;
}

void SliceBuffers::settle(Buffer& buffer) {
  if (!std::exchange(buffer.under_way, false)) return;
  try {
    file_.wait(buffer.ticket);
  } catch (const IoError& error) {
    fail(buffer, error);
  }
}

void SliceBuffers::fail(Buffer& buffer, const IoError& error) {
  const int64_t slice = buffer.slice;
  if (buffer.loads == 0) buffer.slice = -1;  // it holds no slice any more
  if (buffer.writes && failure_.empty()) {
    failure_ = cat("slice ", slice, " of the parameters could not be written: ", without_stack(error.what()),
                   ". What the last update made of it is lost; checkpoints saved earlier are not affected: start again "
                   "from the last one");
  }
  throw IoError(buffer.writes
                    ? failure_
                    : cat("slice ", slice, " of the parameters could not be read: ", without_stack(error.what())));
}

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
  buffers_.note_copies(index);
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
