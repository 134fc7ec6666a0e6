#include "offload/device_copies.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "core/log.h"
#include "offload/aio_file.h"

namespace ds::offload {

DeviceCopies::DeviceCopies(std::unique_ptr<DeviceFile> file, std::vector<at::Tensor> buffers, c10::Device device)
    : file_(std::move(file)), device_(device) {
  ensure(!buffers.empty(), "slices are read into at least one buffer");
  for (at::Tensor& buffer : buffers) {
    ensure(reinterpret_cast<uintptr_t>(buffer.data_ptr()) % AioFile::alignment() == 0, "buffers are whole blocks");
    note_use(buffers_.emplace_back(Buffer{.memory = std::move(buffer)}));
  }
}

DeviceCopies::~DeviceCopies() {
  for (Buffer& buffer : buffers_) {
    try {
      if (buffer.read.valid()) buffer.read.get();
      if (buffer.used) buffer.used->synchronize();
    } catch (const std::exception& error) {
      log::warning("slices of parameters: ", error.what());
    }
  }
}

void DeviceCopies::note_use(Buffer& buffer) const {
  buffer.used = std::make_shared<c10::Event>(device_.type());
  buffer.used->record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
}

DeviceCopies::Buffer* DeviceCopies::holder(int64_t slice) {
  for (Buffer& buffer : buffers_) {
    if (buffer.slice == slice) return &buffer;
  }
  return nullptr;
}

bool DeviceCopies::has_room() const {
  return std::any_of(buffers_.begin(), buffers_.end(), [](const Buffer& buffer) { return buffer.taken == 0; });
}

// In the buffer that was used longest ago, of those that nobody has taken.
DeviceCopies::Buffer& DeviceCopies::start(int64_t slice, const FilePart& part) {
  Buffer* oldest = nullptr;
  for (Buffer& buffer : buffers_) {
    if (buffer.taken == 0 && (oldest == nullptr || buffer.last_use < oldest->last_use)) oldest = &buffer;
  }
  ensure(oldest != nullptr, "copies are taken as long as there are buffers");
  oldest->slice = -1;
  if (oldest->read.valid()) oldest->read.wait();  // of a slice that nobody took
  if (oldest->used) std::exchange(oldest->used, nullptr)->synchronize();
  oldest->read = std::async(std::launch::async, [file = file_.get(), part, memory = oldest->memory.data_ptr()] {
    file->read(part.offset, memory, part.bytes);
  });
  oldest->slice = slice;
  oldest->last_use = ++uses_;
  return *oldest;
}

void DeviceCopies::prefetch(int64_t slice, const FilePart& part) {
  const auto is_free = [](const Buffer& buffer) { return buffer.taken == 0; };
  if (holder(slice) != nullptr || std::count_if(buffers_.begin(), buffers_.end(), is_free) < 2) return;
  start(slice, part);
}

at::Tensor DeviceCopies::take(int64_t slice, const FilePart& part) {
  Buffer* const found = holder(slice);
  Buffer& buffer = found != nullptr ? *found : start(slice, part);
  if (buffer.read.valid()) {
    try {
      buffer.read.get();
    } catch (...) {
      buffer.slice = -1;  // what it holds is nobody's
      throw;
    }
  }
  ++buffer.taken;
  buffer.last_use = ++uses_;
  return buffer.memory;
}

void DeviceCopies::give_back(int64_t slice) {
  Buffer* const buffer = holder(slice);
  ensure(buffer != nullptr && buffer->taken > 0, "a copy is given back as often as it was taken");
  --buffer->taken;
  note_use(*buffer);
}

void DeviceCopies::drop(int64_t slice) {
  Buffer* const buffer = holder(slice);
  if (buffer == nullptr) return;
  ensure(buffer->taken == 0, "a slice changes while nobody gathers it");
  buffer->slice = -1;
}

}  // namespace ds::offload
