#include "offload/slice_swapper.h"

#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <utility>

#include "core/check.h"
#include "core/memory/storage_memory.h"
#include "core/round_up.h"
#include "core/without_stack.h"

namespace ds::offload {
namespace {

int64_t place_of(int64_t bytes) { return round_up(bytes, AioFile::alignment()); }

bool has_memory(const at::Tensor& tensor) { return tensor.storage().nbytes() > 0; }

// The memory of a slice's tensors in a buffer, while this lives.
class SliceMemory {
 public:
  SliceMemory(const std::vector<at::Tensor>& tensors, uint8_t* memory) : tensors_(tensors) {
    for (const at::Tensor& tensor : tensors_) {
      places_.push_back(memory);
      give_storage(tensor, c10::DataPtr(memory, at::kCPU), tensor.nbytes());
      memory += place_of(static_cast<int64_t>(tensor.nbytes()));
    }
  }
  ~SliceMemory() {
    for (const at::Tensor& tensor : tensors_) take_storage(tensor);
  }
  SliceMemory(const SliceMemory&) = delete;
  SliceMemory& operator=(const SliceMemory&) = delete;

  // Whether the tensors are still where they were put.
  bool in_place() const {
    for (size_t i = 0; i < places_.size(); ++i) {
      if (tensors_[i].storage().data() != places_[i]) return false;
    }
    return true;
  }

 private:
  const std::vector<at::Tensor>& tensors_;
  std::vector<uint8_t*> places_;
};

}  // namespace

at::Tensor tensor_without_memory(int64_t numel, at::ScalarType dtype) {
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), 0,
                                                       c10::DataPtr(nullptr, at::kCPU), nullptr, false);
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous({numel});
  return tensor;
}

// Refuses other calls from its construction to the end of a call.
class SliceSwapper::Busy {
 public:
  explicit Busy(SliceSwapper& swapper) : swapper_(swapper) {
    require<IoError>(swapper.failure_.empty(), swapper.failure_);
    require(!swapper.busy_, swapper.file_->path(), ": expected no call of the swapper from within `use`");
    swapper.busy_ = true;
  }
  ~Busy() { swapper_.busy_ = false; }
  Busy(const Busy&) = delete;
  Busy& operator=(const Busy&) = delete;

 private:
  SliceSwapper& swapper_;
};

SwapSizes SliceSwapper::sizes(const std::vector<std::vector<int64_t>>& slices, int64_t buffer_count) {
  SwapSizes sizes;
  int64_t largest = 0;
  for (const auto& tensors : slices) {
    int64_t slice = 0;
    for (const int64_t bytes : tensors) slice += place_of(bytes);
    sizes.file_bytes += slice;
    largest = std::max(largest, slice);
  }
  sizes.buffer_bytes = largest * buffer_count;
  return sizes;
}

SliceSwapper::SliceSwapper(std::unique_ptr<AioFile> file, at::Tensor buffers, int64_t buffer_count)
    : memory_(std::move(buffers)), file_(std::move(file)) {
  const int64_t alignment = AioFile::alignment();
  require(buffer_count >= 1, file_->path(), ": expected at least 1 buffer, found ", buffer_count);
  require(memory_.defined() && memory_.device().is_cpu() && memory_.scalar_type() == at::kByte && memory_.dim() == 1 &&
              memory_.is_contiguous() && reinterpret_cast<uintptr_t>(memory_.data_ptr()) % alignment == 0,
          file_->path(), ": expected flat bytes on the CPU as buffers, at an address that is a multiple of ",
          alignment);
  buffer_bytes_ = memory_.numel() / buffer_count / alignment * alignment;
  for (int64_t i = 0; i < buffer_count; ++i) {
    buffers_.push_back({.memory = memory_.mutable_data_ptr<uint8_t>() + i * buffer_bytes_});
  }
}

void SliceSwapper::require_slice(int64_t index) const {
  require(index >= 0 && index < slice_count(), file_->path(), ": expected a slice from 0 to ", slice_count() - 1,
          ", found ", index);
}

void SliceSwapper::require_fresh(const std::vector<at::Tensor>& tensors) const {
  std::set<const void*> storages;
  for (const Slice& slice : slices_) {
    for (const at::Tensor& tensor : slice.tensors) storages.insert(tensor.storage().unsafeGetStorageImpl());
  }
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = tensors[i];
    require(tensor.defined() && tensor.device().is_cpu() && tensor.is_contiguous() && tensor.storage_offset() == 0 &&
                (!has_memory(tensor) || tensor.storage().nbytes() == tensor.nbytes()),
            file_->path(), ": slice ", slice_count(), ", tensor ", i,
            ": expected a contiguous tensor on the CPU that is the whole of its storage");
    require(storages.insert(tensor.storage().unsafeGetStorageImpl()).second, file_->path(), ": slice ", slice_count(),
            ", tensor ", i, ": expected a storage of its own, found that of another tensor of the swapper");
  }
}

void SliceSwapper::require_order(const std::vector<int64_t>& order) const {
  std::set<int64_t> seen;
  for (const int64_t index : order) {
    require_slice(index);
    require(seen.insert(index).second, file_->path(), ": expected each slice at most once in a pass, found slice ",
            index, " twice");
  }
}

int64_t SliceSwapper::add(std::vector<at::Tensor> tensors) {
  const Busy busy(*this);
  require_fresh(tensors);
  Slice slice{.tensors = std::move(tensors), .offset = end_};
  for (const at::Tensor& tensor : slice.tensors) slice.bytes += place_of(static_cast<int64_t>(tensor.nbytes()));
  require(slice.bytes <= buffer_bytes_ && end_ + slice.bytes <= file_->bytes(), file_->path(), ": slice ",
          slice_count(), " takes ", slice.bytes, " bytes; expected at most ", buffer_bytes_, " (a buffer) and ",
          file_->bytes() - end_, " (what is left of the file); ask SliceSwapper::sizes() with all slices");
  Buffer& buffer = free_buffer();
  int64_t position = 0;
  for (const at::Tensor& tensor : slice.tensors) {
    const auto bytes = static_cast<int64_t>(tensor.nbytes());
    if (has_memory(tensor)) {
      std::memcpy(buffer.memory + position, tensor.data_ptr(), bytes);
      buffer.tickets.push_back(file_->write(end_ + position, buffer.memory + position, place_of(bytes)));
      take_storage(tensor);
    }
    position += place_of(bytes);
  }
  buffer.slice = slice_count();
  if (!buffer.tickets.empty()) buffer.state = State::kWriting;
  end_ += slice.bytes;
  slices_.push_back(std::move(slice));
  return buffer.slice;
}

void SliceSwapper::for_each(const std::vector<int64_t>& order, const Use& use, const PassOptions& options) {
  const Busy busy(*this);
  require_order(order);
  try {
    finish_writes();
    Buffer* ahead = nullptr;
    for (size_t i = 0; i < order.size(); ++i) {
      Buffer& buffer = ahead != nullptr ? *ahead : free_buffer();
      if (ahead == nullptr) start_read(buffer, order[i]);
      finish_read(buffer);
      ahead = options.read_ahead && i + 1 < order.size() ? free_buffer_without_waiting() : nullptr;
      if (ahead != nullptr) start_read(*ahead, order[i + 1]);
      use_in(buffer, use);
      start_write(buffer);
      if (!options.write_behind) finish_write(buffer);
    }
    finish_writes();
  } catch (...) {
    abandon();
    throw;
  }
}

void SliceSwapper::with(int64_t index, bool changed, const Use& use) {
  const Busy busy(*this);
  require_slice(index);
  try {
    finish_writes();
    Buffer& buffer = free_buffer();
    start_read(buffer, index);
    finish_read(buffer);
    use_in(buffer, use);
    if (changed) {
      start_write(buffer);
      finish_write(buffer);
    }
    buffer.state = State::kFree;
  } catch (...) {
    abandon();
    throw;
  }
}

void SliceSwapper::flush() {
  const Busy busy(*this);
  finish_writes();
}

const std::vector<at::Tensor>& SliceSwapper::tensors(int64_t index) const {
  require_slice(index);
  return slices_[index].tensors;
}

// A buffer that is free, if need be once the oldest write is done.
SliceSwapper::Buffer& SliceSwapper::free_buffer() {
  Buffer* oldest = nullptr;
  for (Buffer& buffer : buffers_) {
    if (buffer.state == State::kFree) return buffer;
    if (buffer.state != State::kWriting) continue;
    if (oldest == nullptr || buffer.tickets.front() < oldest->tickets.front()) oldest = &buffer;
  }
  ensure(oldest != nullptr, "one buffer at least is free or being written");
  finish_write(*oldest);
  return *oldest;
}

SliceSwapper::Buffer* SliceSwapper::free_buffer_without_waiting() {
  for (Buffer& buffer : buffers_) {
    if (buffer.state == State::kWriting &&
        std::all_of(buffer.tickets.begin(), buffer.tickets.end(), [&](auto ticket) { return file_->done(ticket); })) {
      finish_write(buffer);
    }
    if (buffer.state == State::kFree) return &buffer;
  }
  return nullptr;
}

void SliceSwapper::start_read(Buffer& buffer, int64_t index) {
  buffer.slice = index;
  buffer.tickets = {file_->read(slices_[index].offset, buffer.memory, slices_[index].bytes)};
  buffer.state = State::kReading;
}

void SliceSwapper::finish_read(Buffer& buffer) {
  const AioFile::Ticket ticket = std::exchange(buffer.tickets, {}).front();
  buffer.state = State::kFree;
  try {
    file_->wait(ticket);
  } catch (const IoError& error) {
    throw IoError(cat("slice ", buffer.slice, " could not be read: ", without_stack(error.what())));
  }
  buffer.state = State::kUsed;
}

void SliceSwapper::use_in(Buffer& buffer, const Use& use) {
  const SliceMemory memory(slices_[buffer.slice].tensors, buffer.memory);
  use(buffer.slice);
  require(memory.in_place(), file_->path(), ": slice ", buffer.slice,
          ": expected its tensors to keep their memory while they are used, found other memory in one; change them in "
          "place");
}

void SliceSwapper::start_write(Buffer& buffer) {
  buffer.tickets = {file_->write(slices_[buffer.slice].offset, buffer.memory, slices_[buffer.slice].bytes)};
  buffer.state = State::kWriting;
}

void SliceSwapper::finish_write(Buffer& buffer) {
  buffer.state = State::kFree;
  for (const AioFile::Ticket ticket : std::exchange(buffer.tickets, {})) {
    try {
      file_->wait(ticket);
    } catch (const IoError& error) {
      if (!failure_.empty()) continue;
      failure_ =
          cat("slice ", buffer.slice, " could not be written: ", without_stack(error.what()),
              ". The optimizer state of this step is lost; checkpoints saved earlier are not affected: start again "
              "from the last one");
    }
  }
  require<IoError>(failure_.empty(), failure_);
}

void SliceSwapper::finish_writes() {
  for (Buffer& buffer : buffers_) {
    if (buffer.state == State::kWriting) finish_write(buffer);
  }
}

// Waits, after a failure, for what is in flight. A failure of a write stays in failure_.
void SliceSwapper::abandon() noexcept {
  for (Buffer& buffer : buffers_) {
    try {
      if (buffer.state == State::kReading) finish_read(buffer);
      if (buffer.state == State::kWriting) finish_write(buffer);
    } catch (const Error&) {
      // The failure that led here is the one to report.
    }
    buffer.state = State::kFree;
  }
}

}  // namespace ds::offload
