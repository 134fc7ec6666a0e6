// Copies of slices in a device's memory, where gathers read them, brought there straight from their file (aio.use_gds).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <cstdint>
#include <future>
#include <memory>
#include <string>
#include <vector>

namespace ds::offload {

// A file that is read straight into a device's memory, past the host's: aio.use_gds.
class DeviceFile {
 public:
  // `descriptor`: open for direct IO, outlives it; `path` for messages. Throws ConfigError that names aio.use_gds: the
  // device is the CPU, or its library cannot read this file so.
  DeviceFile(int descriptor, std::string path, c10::Device device);
  ~DeviceFile();
  DeviceFile(const DeviceFile&) = delete;
  DeviceFile& operator=(const DeviceFile&) = delete;

  // Reads `bytes` from `offset` on to `memory` of the device, at multiples of AioFile::alignment(). Returns when they
  // are there; nothing else uses the memory meanwhile. From any thread. Throws IoError that names the file and the
  // part.
  void read(int64_t offset, void* memory, int64_t bytes) const;

 private:
  std::string path_;
  c10::Device device_;
  void* handle_ = nullptr;
};

// A part of the file, in whole blocks of AioFile::alignment().
struct FilePart {
  int64_t offset = 0;
  int64_t bytes = 0;
};

// The buffers for such copies, and the reads into them. Not thread safe: each read has a thread of its own, which waits
// for the device's library.
class DeviceCopies {
 public:
  // `buffers`: at least one, flat bytes on the device, each as long as the longest part that is read, at multiples of
  // AioFile::alignment(). What the device's current stream has been given may still use their memory. The file outlives
  // this.
  DeviceCopies(std::unique_ptr<DeviceFile> file, std::vector<at::Tensor> buffers, c10::Device device);
  // Waits for what is on its way, and for the device's use of the copies.
  ~DeviceCopies();

  // Whether another copy can be taken, beside those that are.
  bool has_room() const;
  // Begins to read a slice, where there is room for it beside one that nobody foresaw. Nothing writes that part
  // meanwhile.
  void prefetch(int64_t slice, const FilePart& part);
  // Returns the slice's bytes, which are there until it is given back. Reads them unless a copy is there, or on its
  // way. Throws IoError.
  at::Tensor take(int64_t slice, const FilePart& part);
  // Gives a copy back; to be called after what reads it was given to the device's current stream.
  void give_back(int64_t slice);
  // Drops a copy of the slice, which has changed.
  void drop(int64_t slice);

 private:
  struct Buffer {
    at::Tensor memory;
    int64_t slice = -1;  // the slice that it has a copy of, or will have
    int taken = 0;
    std::future<void> read;  // the read under way
    uint64_t last_use = 0;
    std::shared_ptr<c10::Event> used;  // by the device: before there was a copy, or at the last give_back()
  };

  void note_use(Buffer& buffer) const;
  Buffer* holder(int64_t slice);
  Buffer& start(int64_t slice, const FilePart& part);

  std::unique_ptr<DeviceFile> file_;
  std::vector<Buffer> buffers_;
  c10::Device device_;
  uint64_t uses_ = 0;
};

}  // namespace ds::offload
