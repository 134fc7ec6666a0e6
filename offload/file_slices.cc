#include "offload/file_slices.h"

#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "core/log.h"
#include "core/memory/storage_memory.h"
#include "core/round_up.h"
#include "offload/slice_swapper.h"

namespace ds::offload {

int64_t FileSlices::buffer_bytes(const std::vector<int64_t>& sizes) {
  int64_t largest = 0;
  for (const int64_t size : sizes) largest = std::max(largest, TensorFile::memory_bytes(size));
  return largest;
}

FileSlices::FileSlices(std::unique_ptr<AioFile> file, const std::vector<int64_t>& sizes,
                       std::vector<at::Tensor> buffers, std::shared_ptr<PinnedArena> kept, size_t kept_count,
                       at::Device device)
    : file_(std::move(file), sizes), kept_(std::move(kept)), kept_left_(kept_count), device_(device) {
  ensure(!buffers.empty(), "slices are read into at least one buffer");
  for (at::Tensor& buffer : buffers) buffers_.push_back({.memory = std::move(buffer)});
}

FileSlices::~FileSlices() {
  for (Buffer& buffer : buffers_) {
    try {
      settle(buffer);
    } catch (const std::exception& error) {
      log::warning("slices of parameters: ", error.what());
    }
  }
}

// The contents of the buffer, as the tensor of its slice would show them.
at::Tensor FileSlices::contents(const Buffer& buffer) const {
  const at::Tensor& slice = slices_[static_cast<size_t>(buffer.slice)];
  return buffer.memory.view(slice.scalar_type()).narrow(0, 0, slice.numel());
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
  Buffer& buffer = take_buffer(index);
  buffer.loads = 1;
  give_storage(slice, c10::DataPtr(buffer.memory.data_ptr(), at::kCPU), slice.numel() * slice.element_size());
  return slice;
}

int64_t FileSlices::index_of(const at::Tensor& slice) const {
  const auto found = index_.find(slice.storage().unsafeGetStorageImpl());
  return found == index_.end() ? -1 : found->second;
}

FileSlices::Buffer* FileSlices::holder(int64_t slice) {
  for (Buffer& buffer : buffers_) {
    if (buffer.slice == slice) return &buffer;
  }
  return nullptr;
}

// The one that was used longest ago of those that nobody has loaded.
FileSlices::Buffer* FileSlices::oldest_free() {
  Buffer* oldest = nullptr;
  for (Buffer& buffer : buffers_) {
    if (buffer.loads == 0 && (!oldest || buffer.last_use < oldest->last_use)) oldest = &buffer;
  }
  return oldest;
}

void FileSlices::gather_on_device(std::vector<at::Tensor> buffers) {
  const AioFile& file = file_.file();
  copies_ = std::make_unique<DeviceCopies>(std::make_unique<DeviceFile>(file.descriptor(), file.path(), device_),
                                           std::move(buffers), device_);
}

FilePart FileSlices::part_of(int64_t slice) const {
  const at::Tensor& tensor = slices_[static_cast<size_t>(slice)];
  return {file_.offset(slice), TensorFile::memory_bytes(tensor.numel() * tensor.element_size())};
}

at::Tensor FileSlices::begin_gather(const at::Tensor& slice) {
  const int64_t index = index_of(slice);
  if (!copies_ || index < 0) return SliceStore::begin_gather(slice);
  require<IoError>(failure_.empty(), failure_);
  if (Buffer* const buffer = holder(index); buffer != nullptr && buffer->writes) settle(*buffer);
  return copies_->take(index, part_of(index)).view(slice.scalar_type()).narrow(0, 0, slice.numel());
}

void FileSlices::end_gather(const at::Tensor& slice) {
  const int64_t index = index_of(slice);
  if (!copies_ || index < 0) return SliceStore::end_gather(slice);
  copies_->give_back(index);
}

bool FileSlices::has_room() const {
  if (copies_) return copies_->has_room();
  return std::any_of(buffers_.begin(), buffers_.end(), [](const Buffer& buffer) { return buffer.loads == 0; });
}

FileSlices::Buffer& FileSlices::take_buffer(int64_t slice) {
  Buffer* const buffer = oldest_free();
  ensure(buffer != nullptr, "slices are loaded as long as there are buffers");
  settle(*buffer);
  if (buffer->copied) std::exchange(buffer->copied, nullptr)->synchronize();
  buffer->slice = slice;
  buffer->last_use = ++uses_;
  return *buffer;
}

// Reads the buffer's slice, or writes it.
void FileSlices::start(Buffer& buffer, bool writes) {
  buffer.writes = writes;
  try {
    buffer.ticket =
        writes ? file_.start_write(buffer.slice, contents(buffer)) : file_.start_read(buffer.slice, contents(buffer));
  } catch (const IoError& error) {
    fail(buffer, error);
  }
  buffer.under_way = true;
}

void FileSlices::settle(Buffer& buffer) {
  if (!std::exchange(buffer.under_way, false)) return;
  try {
    file_.wait(buffer.ticket);
  } catch (const IoError& error) {
    fail(buffer, error);
  }
}

void FileSlices::fail(Buffer& buffer, const IoError& error) {
  const int64_t slice = buffer.slice;
  if (buffer.loads == 0) buffer.slice = -1;  // it holds no slice any more
  if (buffer.writes && failure_.empty()) {
    failure_ = cat("slice ", slice, " of the parameters could not be written: ", error.what(),
                   ". What the last update made of it is lost; checkpoints saved earlier are not affected: start again "
                   "from the last one");
  }
  throw IoError(buffer.writes ? failure_
                              : cat("slice ", slice, " of the parameters could not be read: ", error.what()));
}

// Copies to the device only read the buffer: they do not keep the host waiting before another slice needs it.
void FileSlices::note_copies(Buffer& buffer) {
  if (device_.is_cpu()) return;
  buffer.copied = std::make_shared<c10::Event>(device_.type());
  buffer.copied->record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
}

// Whether nothing is being written from the buffer any more. begin_gather() says what went wrong.
bool FileSlices::has_written(Buffer& buffer) {
  if (!buffer.under_way || !buffer.writes) return true;
  try {
    if (!file_.done(buffer.ticket)) return false;
    settle(buffer);
  } catch (const IoError&) {
    return false;
  }
  return true;
}

void FileSlices::prefetch(const at::Tensor& slice) {
  if (!failure_.empty()) return;  // load() says it
  const int64_t index = index_of(slice);
  if (copies_ && index >= 0) {
    Buffer* const buffer = holder(index);
    if (buffer == nullptr || has_written(*buffer)) copies_->prefetch(index, part_of(index));
    return;
  }
  // One buffer stays for a load that nobody foresaw.
  const auto is_free = [](const Buffer& buffer) { return buffer.loads == 0; };
  if (index < 0 || holder(index) || std::count_if(buffers_.begin(), buffers_.end(), is_free) < 2) return;
  start(take_buffer(index), /*writes=*/false);
}

void FileSlices::load(const at::Tensor& slice) {
  const int64_t index = index_of(slice);
  if (index < 0) return;
  require<IoError>(failure_.empty(), failure_);
  Buffer* buffer = holder(index);
  if (!buffer) {
    buffer = &take_buffer(index);
    start(*buffer, /*writes=*/false);
  }
  settle(*buffer);  // waits for a write too: the values that it writes must not change
  buffer->last_use = ++uses_;
  if (buffer->loads++ > 0) return;
  give_storage(slice, c10::DataPtr(buffer->memory.data_ptr(), at::kCPU), slice.numel() * slice.element_size());
}

void FileSlices::unload(const at::Tensor& slice, bool changed) {
  const int64_t index = index_of(slice);
  if (index < 0) return;
  Buffer* const buffer = holder(index);
  ensure(buffer != nullptr && buffer->loads > 0, "a slice is unloaded as often as it was loaded");
  if (--buffer->loads == 0) take_storage(slice);
  note_copies(*buffer);
  if (!changed) return;
  if (copies_) copies_->drop(index);
  settle(*buffer);
  start(*buffer, /*writes=*/true);
}

int64_t TensorFile::memory_bytes(int64_t size) { return round_up(size, AioFile::alignment()); }

int64_t TensorFile::file_bytes(const std::vector<int64_t>& sizes) {
  int64_t total = 0;
  for (const int64_t size : sizes) total += memory_bytes(size);
  return total;
}

TensorFile::TensorFile(std::unique_ptr<AioFile> file, const std::vector<int64_t>& sizes) : file_(std::move(file)) {
  require(file_->bytes() >= file_bytes(sizes), file_->path(),
          ": expected a file of TensorFile::file_bytes(sizes) = ", file_bytes(sizes), " bytes, found ", file_->bytes());
  int64_t offset = 0;
  for (const int64_t size : sizes) {
    parts_.push_back({offset, size});
    offset += memory_bytes(size);
  }
}

void TensorFile::require_fits(int64_t index, const at::Tensor& tensor) const {
  require(index >= 0 && index < static_cast<int64_t>(parts_.size()), file_->path(), ": expected a tensor from 0 to ",
          parts_.size() - 1, ", found ", index);
  const int64_t bytes = parts_[index].bytes;
  require(tensor.defined() && tensor.device().is_cpu() && tensor.dim() == 1 && tensor.is_contiguous() &&
              static_cast<int64_t>(tensor.nbytes()) == bytes,
          file_->path(), ": tensor ", index, ": expected a flat, contiguous tensor of ", bytes,
          " bytes on the CPU, found ", lazy([&] {
            return tensor.defined() ? cat(tensor.nbytes(), " bytes of shape ", tensor.sizes(), " on ", tensor.device())
                                    : "none";
          }));
  const auto room = static_cast<int64_t>(tensor.storage().nbytes()) - tensor.storage_offset() * tensor.element_size();
  require(room >= memory_bytes(bytes), file_->path(), ": tensor ", index, ": expected a storage with ",
          memory_bytes(bytes), " bytes from the tensor's first element on, found ", room,
          "; make it TensorFile::memory_bytes() long");
}

AioFile::Ticket TensorFile::start_read(int64_t index, const at::Tensor& into) {
  require_fits(index, into);
  const Part& part = parts_[index];
  const auto ticket = file_->read(part.offset, into.data_ptr(), memory_bytes(part.bytes));
  under_way_.emplace_back(ticket, into);
  return ticket;
}

AioFile::Ticket TensorFile::start_write(int64_t index, const at::Tensor& from) {
  require_fits(index, from);
  const Part& part = parts_[index];
  const auto ticket = file_->write(part.offset, from.data_ptr(), memory_bytes(part.bytes));
  under_way_.emplace_back(ticket, from);
  return ticket;
}

void TensorFile::wait(AioFile::Ticket ticket) {
  const auto found =
      std::find_if(under_way_.begin(), under_way_.end(), [&](const auto& entry) { return entry.first == ticket; });
  at::Tensor kept;
  if (found != under_way_.end()) {
    kept = std::move(found->second);
    under_way_.erase(found);
  }
  file_->wait(ticket);
}

}  // namespace ds::offload
