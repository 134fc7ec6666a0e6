#include "offload/device_copies.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "core/log.h"
#include "core/without_stack.h"
#include "offload/aio_file.h"
#include "offload/device_file_calls.h"

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
      log::warning("slices of parameters: ", without_stack(error.what()));
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

// Begins to read a slice into the buffer that was used longest ago, of those that nobody has taken.
DeviceCopies::Buffer& DeviceCopies::start(int64_t slice, const FilePart& part) {
  Buffer* oldest = nullptr;
  for (Buffer& buffer : buffers_) {
    if (buffer.taken == 0 && (oldest == nullptr || buffer.last_use < oldest->last_use)) oldest = &buffer;
  }
  ensure(oldest != nullptr, "copies are taken as long as there are buffers");
  oldest->slice = -1;
  if (oldest->read.valid()) oldest->read.wait();  // the read of a slice that nobody took
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
      buffer.slice = -1;  // it holds no slice any more
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

namespace {

constexpr const char* kElse = "; use false: files are then read into host memory and copied from there";

}  // namespace

DeviceFile::DeviceFile(int descriptor, std::string path, c10::Device device) : path_(std::move(path)), device_(device) {
  require<ConfigError>(!device_.is_cpu(), "aio.use_gds: expected a GPU whose memory files are read into, found the CPU",
                       kElse);
  const auto* const calls = device_functions<DeviceFileCalls>();
  require<ConfigError>(calls != nullptr, "aio.use_gds: expected libdsengine_cuda, which calls cuFile, found no such ",
                       "library for ", device_, kElse);
  const c10::DeviceGuard guard(device_);
  std::string reason;
  handle_ = calls->open(descriptor, reason);
  require<ConfigError>(handle_ != nullptr, "aio.use_gds: ", path_, ": expected a file that cuFile reads into ", device_,
                       ", found: ", reason, kElse);
}

DeviceFile::~DeviceFile() {
  if (handle_ != nullptr) device_functions<DeviceFileCalls>()->close(handle_);
}

void DeviceFile::read(int64_t offset, void* memory, int64_t bytes) const {
  const c10::DeviceGuard guard(device_);
  for (int64_t done = 0; done < bytes;) {
    std::string reason;
    const int64_t read = device_functions<DeviceFileCalls>()->read(handle_, static_cast<char*>(memory) + done,
                                                                   bytes - done, offset + done, reason);
    require<IoError>(read > 0, path_, ": read ", bytes, " bytes from offset ", offset, " into ", device_,
                     ": expected all of them, found ", done, ": ", read == 0 ? "the file ends there" : reason);
    done += read;
  }
}

}  // namespace ds::offload
