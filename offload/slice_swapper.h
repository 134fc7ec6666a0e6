// Optimizer state on a disk: tensors that live in a file and have memory only while they are used (ZeRO-Infinity,
// Rajbhandari et al., arXiv:2104.07857, section 5.2.2).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "offload/aio_file.h"

namespace ds::offload {

struct SwapSizes {
  int64_t file_bytes = 0;
  int64_t buffer_bytes = 0;
};

// The transfers that go on while a slice is used. With 3 buffers both can, with 2 one of them, with 1 neither.
struct PassOptions {
  bool read_ahead = true;    // read the next slice (pipeline_read)
  bool write_behind = true;  // write the last ones (pipeline_write)
};

// Makes a tensor of `numel` elements on the CPU in a storage of its own that has no memory. As a state of a slice it
// begins as zeros, which need not be written.
at::Tensor tensor_without_memory(int64_t numel, at::ScalarType dtype);

// A slice is a group of tensors that are used together: master and optimizer states. Its place in the file is as in a
// buffer: one tensor after the other, each from a multiple of AioFile::alignment() on, so that it moves as one
// transfer.
//
// Tensors keep their identity: references to them stay good, but they can be read only within `use`. One call at a
// time, from a thread that lives until the call returns; `use` must not call the swapper.
//
// After a failure, a slice that `use` was not called for, or threw for, is on the disk as before, also when a read
// failed. Slices used before it have their new contents. When a write fails, the contents of its slice are lost; when
// the file is given up (offload/aio_file.h), those of all: from then on every call throws IoError with the reason.
class SliceSwapper {
 public:
  using Use = std::function<void(int64_t index)>;

  // The sizes that slices, given by the bytes of each of their tensors, and so many buffers need.
  static SwapSizes sizes(const std::vector<std::vector<int64_t>>& slices, int64_t buffer_count);

  // The file must hold nothing yet. `buffers`: flat bytes at an address that is a multiple of AioFile::alignment(),
  // kept while the swapper lives. Throws UsageError.
  SliceSwapper(std::unique_ptr<AioFile> file, at::Tensor buffers, int64_t buffer_count);
  // Waits for what is in flight. The tensors stay without memory.
  ~SliceSwapper() = default;
  SliceSwapper(const SliceSwapper&) = delete;
  SliceSwapper& operator=(const SliceSwapper&) = delete;

  // Takes a slice and returns its index, from 0. `tensors`: contiguous, on the CPU, each the whole of a storage of its
  // own. Their contents go to the file and their memory is given up; those without memory are zeros. The writes may be
  // under way when this returns. Throws UsageError for other tensors, or what is larger than sizes() was told.
  int64_t add(std::vector<at::Tensor> tensors);

  // Calls `use` for the slices of `order` (each at most once), one after the other. Within the call the tensors of that
  // slice have memory; what they then hold is written. All is written on return.
  void for_each(const std::vector<int64_t>& order, const Use& use, const PassOptions& options = {});
  // Calls `use` for a single slice, whose contents are written afterwards only if `changed`.
  void with(int64_t index, bool changed, const Use& use);
  // Waits until all writes have arrived.
  void flush();

  int64_t slice_count() const { return static_cast<int64_t>(slices_.size()); }
  const std::vector<at::Tensor>& tensors(int64_t index) const;

 private:
  struct Slice {
    std::vector<at::Tensor> tensors;
    int64_t offset = 0;  // in the file
    int64_t bytes = 0;
  };
  enum class State { kFree, kReading, kUsed, kWriting };
  struct Buffer {
    uint8_t* memory = nullptr;
    State state = State::kFree;
    int64_t slice = -1;
    std::vector<AioFile::Ticket> tickets;
  };
  class Busy;

  void require_slice(int64_t index) const;
  void require_fresh(const std::vector<at::Tensor>& tensors) const;
  void require_order(const std::vector<int64_t>& order) const;

  Buffer& free_buffer();
  Buffer* free_buffer_without_waiting();
  void start_read(Buffer& buffer, int64_t index);
  void finish_read(Buffer& buffer);
  void use_in(Buffer& buffer, const Use& use);
  void start_write(Buffer& buffer);
  void finish_write(Buffer& buffer);
  void finish_writes();
  void abandon() noexcept;

  at::Tensor memory_;
  int64_t buffer_bytes_ = 0;  // the length of each buffer
  std::vector<Buffer> buffers_;
  std::vector<Slice> slices_;
  int64_t end_ = 0;  // where the slices end in the file, in bytes
  bool busy_ = false;
  std::string failure_;            // why a write failed; empty: none has
  std::unique_ptr<AioFile> file_;  // destroyed first: waits for what is in flight
};

}  // namespace ds::offload
