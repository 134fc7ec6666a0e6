// A file written by torch.save (torch 1.6 or newer), or by LibTorch's torch::save: values at once, tensors when asked
// for. Nothing in it is run.
//
// The container is a zip file (core/files/stored_zip.h); the code that LibTorch adds to a module is not read.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>

#include "checkpoint/pickle/pickle_reader.h"
#include "core/files/stored_zip.h"

namespace ds::checkpoint {

// The kinds of contents that are accepted. kValues: values, as Python's torch.save writes them. kModules: archives of
// modules too, TorchScript's format, which LibTorch's torch::save writes: an object of a class "__torch__...." for each
// module, whose state is a dict of its attributes.
enum class ArchiveContents { kValues, kModules };

// The opened file. Maps it. Safe for concurrent readers.
class TorchArchive {
 public:
  // Throws IoError naming the path: not such a file, truncated, damaged, big-endian, an archive of modules unless
  // `contents` says that they will do.
  explicit TorchArchive(const std::string& path, ArchiveContents contents = ArchiveContents::kValues);

  const std::string& path() const { return zip_.path(); }
  // Returns the value that was saved. Throws UsageError after forget().
  const PickleValue& root() const;
  // Frees the values; references to tensors stay good.
  void forget() { pickle_.reset(); }

  // Reads elements [offset, offset + destination.numel()) of the flattened tensor into `destination`, which is
  // contiguous, on the CPU and may have any dtype (values are converted). Throws IoError naming file and record,
  // UsageError for a range outside.
  void read(const TensorReference& tensor, int64_t offset, const at::Tensor& destination) const;
  // Returns a copy of the whole tensor.
  at::Tensor tensor(const TensorReference& tensor) const;
  // Throws IoError unless the file has the elements of `tensor`, of a type that can be read.
  void check(const TensorReference& tensor) const;

 private:
  std::string record_name(const TensorReference& tensor) const;
  // Returns elements of the storage from `offset` on: a view of the mapping, or a copy where the file has them
  // unaligned.
  at::Tensor stored(const TensorReference& tensor, int64_t offset, int64_t numel) const;

  StoredZip zip_;
  std::string folder_;  // the folder that its records are in: "archive/"
  std::unique_ptr<Pickle> pickle_;
};

}  // namespace ds::checkpoint
