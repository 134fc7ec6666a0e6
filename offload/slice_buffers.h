// Buffers in host memory that hold slices of a file while these are loaded, and afterwards until another slice needs
// one.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/check.h"
#include "offload/aio_file.h"
#include "offload/tensor_file.h"

namespace ds::offload {

// Reads slices into buffers and writes them from there, each slice by its index in the file. Writes go on behind the
// caller. What a failed write was to keep is lost: from then on require_intact() throws. Not thread safe.
class SliceBuffers {
 public:
  // `sizes`: bytes of the slices. `buffers`: at least one, flat bytes in host memory, each as long as
  // FileSlices::buffer_bytes(sizes). `device`: its current stream is given copies of loaded slices, before unload(). A
  // buffer waits for them before another slice gets it.
  SliceBuffers(std::unique_ptr<AioFile> file, const std::vector<int64_t>& sizes, std::vector<at::Tensor> buffers,
               at::Device device);
  // Waits for what is in flight.
  ~SliceBuffers();

  // Gives a new slice of `bytes` a buffer, loaded, with unspecified contents. Returns the buffer's memory.
  void* add(int64_t slice, int64_t bytes);
  // Loads a slice: reads it unless a buffer holds it. Returns the buffer's memory; a null pointer where the slice was
  // loaded already. Throws IoError.
  void* load(int64_t slice, int64_t bytes);
  // Ends one load() of a slice; returns whether none is left.
  bool unload(int64_t slice);
  // Begins to write a slice whose elements are in a buffer. Throws IoError.
  void write(int64_t slice);
  // Begins to read a slice where a buffer is free beside one, which stays for a load that nobody foresaw.
  void prefetch(int64_t slice, int64_t bytes);
  // Tells whether a buffer is free for another slice.
  bool has_room() const;

  // Waits until the file has what was written of a slice. Throws IoError.
  void finish_write(int64_t slice);
  // Tells whether the file has what was written of a slice, without waiting. finish_write() says what went wrong.
  bool has_written(int64_t slice);
  // Throws IoError with the reason once a write has failed.
  void require_intact() const { require<IoError>(failure_.empty(), failure_); }
  bool is_intact() const { return failure_.empty(); }

  const TensorFile& file() const { return file_; }

 private:
  struct Buffer {
    at::Tensor memory;
    int64_t slice = -1;  // the slice whose elements it holds, or will hold
    int64_t bytes = 0;   // the size of the slice
    int loads = 0;       // without unload()
    bool under_way = false;
    bool writes = false;  // the transfer under way is a write
    AioFile::Ticket ticket = 0;
    uint64_t last_use = 0;
    std::shared_ptr<c10::Event> copied;  // the point after the copies to the device, at the last unload()
  };

  // Returns the buffer that holds a slice; a null pointer: none does.
  Buffer* find(int64_t slice);
  // Gives a slice the free buffer that was used longest ago.
  Buffer& take(int64_t slice, int64_t bytes);
  // Begins to read the buffer's slice, or to write it.
  void start(Buffer& buffer, bool writes);
  // Waits for the transfer under way.
  void settle(Buffer& buffer);
  [[noreturn]] void fail(Buffer& buffer, const IoError& error);

  TensorFile file_;
  std::vector<Buffer> buffers_;
  at::Device device_;
  uint64_t uses_ = 0;
  std::string failure_;  // why a write failed; empty: none has
};

}  // namespace ds::offload
