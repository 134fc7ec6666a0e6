// Slices of parameters in a file (offload_param: nvme), read into host memory when they are gathered (ZeRO-Infinity,
// Rajbhandari et al., arXiv:2104.07857, section 6.1). Part of them may stay in host memory for good (max_in_cpu).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/check.h"
#include "core/slices/slice_store.h"
#include "offload/aio_file.h"
#include "offload/device_copies.h"
#include "offload/pinned_arena.h"
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
  // Notes that the device's stream has been given copies of the slice up to here.
  void note_copies(int64_t slice);
  // Begins to write a slice whose elements are in a buffer. Throws IoError.
  void write(int64_t slice);
  // Begins to read a slice where a buffer is free beside one, which stays for a load that nobody foresaw.
  void prefetch(int64_t slice, int64_t bytes);
  // Tells whether a buffer is free for another slice.
  bool has_room() const;

  // Waits until the file has what was written of a slice. Throws IoError.
  void finish_write(int64_t slice);
  // Tells whether the file has what was written of a slice, without waiting. require_intact(), else finish_write(),
  // says what went wrong.
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

// A slice that is not loaded has no memory: its tensor gets that of a buffer with load(), and what a buffer holds is
// read again only when another slice has used it since. Writes go on behind the caller. Throws IoError. What a failed
// write was to keep is lost: from then on every load() throws IoError with the reason, as it does for what has to be
// read from a file that is given up (offload/aio_file.h).
class FileSlices final : public SliceStore {
 public:
  // Bytes of the file for slices of these sizes (in bytes), and of one buffer for all of them.
  static int64_t file_bytes(const std::vector<int64_t>& sizes) { return TensorFile::file_bytes(sizes); }
  static int64_t buffer_bytes(const std::vector<int64_t>& sizes);

  // `sizes`: bytes of the slices that go to the file, in the order in which they are allocated. `buffers`: at least
  // one, flat bytes in host memory, each buffer_bytes(sizes) long. `kept`: memory of the slices that stay in host
  // memory, the first `kept_count` that are allocated; may be null when these have no elements. `device`: whose current
  // stream is given copies of loaded slices, before unload(). A buffer waits for them before another slice gets it.
  FileSlices(std::unique_ptr<AioFile> file, const std::vector<int64_t>& sizes, std::vector<at::Tensor> buffers,
             std::shared_ptr<PinnedArena> kept, size_t kept_count, at::Device device = at::kCPU);
  // Makes gathers read slices of the file straight into `buffers` from now on, which are as those of DeviceCopies.
  // Throws ConfigError.
  void gather_on_device(std::vector<at::Tensor> buffers);

  at::Tensor allocate(int64_t numel, at::ScalarType dtype) override;
  void load(const at::Tensor& slice) override;
  void unload(const at::Tensor& slice, bool changed) override;
  at::Tensor begin_gather(const at::Tensor& slice) override;
  void end_gather(const at::Tensor& slice) override;
  void prefetch(const at::Tensor& slice) override;
  bool has_room() const override;

 private:
  int64_t index_of(const at::Tensor& slice) const;  // -1: stays in host memory
  FilePart part_of(int64_t index, const at::Tensor& slice) const;

  SliceBuffers buffers_;
  std::vector<at::Tensor> slices_;
  std::unordered_map<const void*, int64_t> index_;  // by storage
  std::shared_ptr<PinnedArena> kept_;
  size_t kept_left_;  // slices to be allocated there
  at::Device device_;
  std::unique_ptr<DeviceCopies> copies_;  // null: gathers read what is in host memory
};

}  // namespace ds::offload
