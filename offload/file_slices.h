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
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/slices/slice_store.h"
#include "offload/aio_file.h"
#include "offload/device_copies.h"
#include "offload/pinned_arena.h"

namespace ds::offload {

// Flat tensors of fixed sizes in a file, read and written one by one. Each tensor has a part of the file of its own, in
// whole blocks of AioFile::alignment(). Threads as in AioFile.
class TensorFile {
 public:
  // Bytes that tensors of these sizes (in bytes) take in the file, and that one tensor takes in the file and in memory.
  static int64_t file_bytes(const std::vector<int64_t>& sizes);
  static int64_t memory_bytes(int64_t size);

  // The file must hold file_bytes(sizes). A tensor that was never written reads as zeros.
  TensorFile(std::unique_ptr<AioFile> file, const std::vector<int64_t>& sizes);

  // Begin a transfer. `into`, `from`: flat, contiguous, of the size of tensor `index`, in host memory at an address
  // that is a multiple of AioFile::alignment(), in a storage with room for memory_bytes() from there on: direct IO
  // moves whole blocks. Keeps a reference until the transfer is waited for. Throws UsageError for another tensor.
  AioFile::Ticket start_read(int64_t index, const at::Tensor& into);
  AioFile::Ticket start_write(int64_t index, const at::Tensor& from);
  // Waits for a transfer. Throws IoError. A ticket is good for one wait().
  void wait(AioFile::Ticket ticket);
  bool done(AioFile::Ticket ticket) { return file_->done(ticket); }

  const AioFile& file() const { return *file_; }
  // The place where tensor `index` begins in the file.
  int64_t offset(int64_t index) const { return parts_.at(static_cast<size_t>(index)).offset; }

 private:
  void require_fits(int64_t index, const at::Tensor& tensor) const;

  struct Part {
    int64_t offset;
    int64_t bytes;
  };
  std::vector<Part> parts_;
  std::vector<std::pair<AioFile::Ticket, at::Tensor>> under_way_;
  std::unique_ptr<AioFile> file_;  // destroyed first: waits for what is in flight
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
  // Waits for what is in flight.
  ~FileSlices() override;

  at::Tensor allocate(int64_t numel, at::ScalarType dtype) override;
  void load(const at::Tensor& slice) override;
  void unload(const at::Tensor& slice, bool changed) override;
  at::Tensor begin_gather(const at::Tensor& slice) override;
  void end_gather(const at::Tensor& slice) override;
  void prefetch(const at::Tensor& slice) override;
  bool has_room() const override;

 private:
  struct Buffer {
    at::Tensor memory;
    int64_t slice = -1;  // whose elements it holds, or will hold
    int loads = 0;       // without unload()
    bool under_way = false;
    bool writes = false;  // the transfer under way is a write
    AioFile::Ticket ticket = 0;
    uint64_t last_use = 0;
    std::shared_ptr<c10::Event> copied;  // by the device, at the last unload()
  };

  int64_t index_of(const at::Tensor& slice) const;  // -1: stays in host memory
  Buffer* holder(int64_t slice);
  Buffer* oldest_free();
  Buffer& take_buffer(int64_t slice);
  void start(Buffer& buffer, bool writes);
  void settle(Buffer& buffer);
  bool has_written(Buffer& buffer);
  [[noreturn]] void fail(Buffer& buffer, const IoError& error);
  void note_copies(Buffer& buffer);
  at::Tensor contents(const Buffer& buffer) const;
  FilePart part_of(int64_t slice) const;

  TensorFile file_;
  std::vector<Buffer> buffers_;
  std::vector<at::Tensor> slices_;
  std::unordered_map<const void*, int64_t> index_;  // by storage
  std::shared_ptr<PinnedArena> kept_;
  size_t kept_left_;  // slices to be allocated there
  at::Device device_;
  std::unique_ptr<DeviceCopies> copies_;  // null: gathers read what is in host memory
  uint64_t uses_ = 0;
  std::string failure_;  // why a write failed; empty: none has
};

}  // namespace ds::offload
