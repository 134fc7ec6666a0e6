// A file written by torch.save (torch 1.6 or newer), or by LibTorch's torch::save: values at once, tensors when asked
// for. Nothing in it is run.
//
// The container is a zip file (also zip64) whose records are stored as they are, but for the code that LibTorch adds to
// a module, which is left out. LibTorch's PyTorchStreamReader is not used: it checks no sums, takes compressed records
// for stored ones, finds names whatever their case, and gives offsets that may lie outside the file.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>

#include "checkpoint/pickle/pickle_reader.h"
#include "core/files/mapped_file.h"

namespace ds::checkpoint {

// The records of a zip file that stores them uncompressed. Maps the file; only its directory is read. Safe for
// concurrent readers.
class StoredZip {
 public:
  // Throws IoError naming the path: no zip file, truncated, damaged, compressed or encrypted records, a record outside
  // the file, a name twice.
  explicit StoredZip(const std::string& path);

  const std::string& path() const { return path_; }
  bool contains(const std::string& name) const { return records_.contains(name); }
  // Returns the bytes of a record, valid while the object lives. Throws IoError for an unknown name.
  std::span<const uint8_t> record(const std::string& name) const { return find(name).bytes; }
  // Throws IoError when the record is not what was written. Without effect where the writer left out checksums
  // (torch.serialization.set_crc32_options(False)).
  void check_sum(const std::string& name) const;
  // Returns the first name that ends with `end`, or an empty text.
  std::string name_ending(const std::string& end) const;

 private:
  struct Record {
    std::span<const uint8_t> bytes;
    uint32_t checksum = 0;
  };
  struct Directory {
    uint64_t begin = 0;
    uint64_t bytes = 0;
  };
  const Record& find(const std::string& name) const;
  [[noreturn]] void fail(const std::string& what) const;
  std::span<const uint8_t> part(uint64_t begin, uint64_t count, const char* what) const;
  Directory find_directory() const;
  Directory wide_directory(uint64_t end_record) const;
  void read_directory(const Directory& directory);
  // Adds the record that begins at `at` of the directory; returns where the next one begins.
  uint64_t read_entry(uint64_t at);
  std::span<const uint8_t> data_of(const std::string& name, uint64_t header, uint64_t count) const;

  std::string path_;
  MappedFile file_;
  std::map<std::string, Record> records_;
};

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
