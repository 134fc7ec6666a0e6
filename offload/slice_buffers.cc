#include "offload/slice_buffers.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

#include "core/log.h"

namespace ds::offload {

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
      log::warning("slices of parameters: ", error.what());
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
  --buffer->loads;
  // Copies to the device only read the buffer: they do not keep the host waiting before another slice needs it.
  if (!device_.is_cpu()) {
    buffer->copied = std::make_shared<c10::Event>(device_.type());
    buffer->copied->record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  }
  return buffer->loads == 0;
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
    failure_ = cat("slice ", slice, " of the parameters could not be written: ", error.what(),
                   ". What the last update made of it is lost; checkpoints saved earlier are not affected: start again "
                   "from the last one");
  }
  throw IoError(buffer.writes ? failure_
                              : cat("slice ", slice, " of the parameters could not be read: ", error.what()));
}

}  // namespace ds::offload
