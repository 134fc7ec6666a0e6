// Zip files as LibTorch writes them (torch.save, torch::save, torch.export.save), also zip64: records are stored as
// they are, but for code, which is left out. Torch-free.
//
// LibTorch's PyTorchStreamReader is not used: it checks no sums, takes compressed records for stored ones, finds names
// whatever their case, and gives offsets that may lie outside the file.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "core/files/mapped_file.h"

namespace ds {

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
  // The position of a record's bytes in the file, and those of the checksums (four bytes, little-endian) that go with
  // it, for whoever writes the file again with another value of the same length. No checksums: the writer left them
  // out.
  uint64_t position(const std::string& name) const;
  std::vector<uint64_t> checksum_positions(const std::string& name) const;
  // All bytes of the file.
  std::span<const uint8_t> bytes() const { return file_.bytes(); }
  // Throws IoError when the record is not what was written. Without effect where the writer left out checksums
  // (torch.serialization.set_crc32_options(False)).
  void check_sum(const std::string& name) const;
  // The names of all records, sorted.
  std::vector<std::string> names() const;
  // Returns the first name that ends with `end`, or an empty text.
  std::string name_ending(const std::string& end) const;

 private:
  struct Record {
    std::span<const uint8_t> bytes;
    uint32_t checksum = 0;
    uint64_t entry = 0;   // position in the directory
    uint64_t header = 0;  // position of the header before the bytes
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

}  // namespace ds
