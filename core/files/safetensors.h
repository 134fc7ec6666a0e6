// Tensors in files of the safetensors format (github.com/huggingface/safetensors): 8 bytes little-endian header length
// N, N bytes of JSON {name: {dtype, shape, data_offsets}}, then the data, row-major, without holes.
//
// dtypes: F64, F32, F16, BF16, I64, I32, I16, I8, U8, BOOL.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/files/atomic_file.h"
#include "core/files/mapped_file.h"

namespace ds {

// The format's name of a dtype ("BF16") and back. Throws UsageError / returns nothing for one that it lacks.
const char* safetensors_name(at::ScalarType dtype);
std::optional<at::ScalarType> safetensors_dtype(const std::string& name);
// Whether the format has this dtype.
bool safetensors_holds(at::ScalarType dtype);

// An open file. Nothing is read before a tensor is touched. Safe for concurrent readers.
class SafetensorsFile {
 public:
  struct Entry {
    std::string name;
    at::ScalarType dtype;
    std::vector<int64_t> sizes;
    size_t begin = 0;  // offsets into the data, in bytes
    size_t end = 0;
  };

  // Maps the file and checks the whole header: lengths, types, shapes, duplicate names, overlaps, holes. Throws IoError
  // naming the path, the tensor, what was expected and what was found.
  explicit SafetensorsFile(const std::string& path);

  const std::string& path() const { return path_; }
  // The tensors of the file, in the order of their data.
  const std::vector<Entry>& entries() const { return entries_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  bool contains(const std::string& name) const { return index_.contains(name); }

  // Returns a view of the mapping, which it keeps alive beyond this object (a copy where a foreign writer left the data
  // unaligned). What is written to it never reaches the file. Throws IoError for an unknown name.
  at::Tensor tensor(const std::string& name) const;

 private:
  void parse_header(const std::string& header);
  void check_layout(size_t data_bytes);

  std::string path_;
  std::shared_ptr<MappedFile> file_;
  size_t data_begin_ = 0;
  std::vector<Entry> entries_;
  std::map<std::string, size_t> index_;
  std::map<std::string, std::string> metadata_;
};

// Writes a file whose tensors come one after the other, in any order, so that they need not be in memory together.
// Order in the file is that of the Python package: larger element types first, then by name. Not thread safe.
class SafetensorsWriter {
 public:
  struct Header {
    std::string name;
    at::ScalarType dtype;
    std::vector<int64_t> sizes;
  };

  // Throws IoError (the file cannot be created) and UsageError (dtype that the format lacks, name given twice). `path`
  // is left untouched until commit(), and altogether without it.
  SafetensorsWriter(const std::string& path, const std::vector<Header>& headers,
                    const std::map<std::string, std::string>& metadata = {});

  // Writes a tensor, which may be on any device. Throws UsageError when it is not as announced or was written before,
  // IoError.
  void write(const std::string& name, const at::Tensor& tensor);
  // Writes part of a tensor's data, from `position` bytes into it. Once all its bytes are given, in any order, without
  // overlap, the tensor is written. Throws UsageError for bytes that lie outside, IoError.
  void write_bytes(const std::string& name, size_t position, const void* data, size_t bytes);
  // The place where a tensor's data begins in the file, in bytes.
  size_t position(const std::string& name) const;
  // The length of the whole file.
  size_t bytes() const { return bytes_; }
  // The file's first bytes: length, JSON, padding.
  const std::string& header() const { return header_; }
  // Completes the file. Throws UsageError naming a tensor that was not written, IoError. `durable`: see
  // core/files/atomic_file.h.
  void commit(bool durable = true);

 private:
  struct Place {
    at::ScalarType dtype;
    std::vector<int64_t> sizes;
    size_t begin = 0;  // in the file
    size_t end = 0;
    size_t missing = 0;  // bytes
    bool written = false;
  };
  AtomicFile file_;
  std::map<std::string, Place> places_;
  std::string header_;
  size_t bytes_ = 0;
};

// Writes all tensors, or leaves `path` untouched. Throws as SafetensorsWriter.
void write_safetensors(const std::string& path, const std::vector<std::pair<std::string, at::Tensor>>& tensors,
                       const std::map<std::string, std::string>& metadata = {});

}  // namespace ds
