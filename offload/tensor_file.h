// Tensors in a file, read and written one by one.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "offload/aio_file.h"

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

}  // namespace ds::offload
