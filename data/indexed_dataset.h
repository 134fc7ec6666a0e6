// The files that DeepSpeed's DataAnalyzer and Megatron-LM write: rows of integers, in the format of Megatron's
// MMapIndexedDataset. PATH.bin is all elements, one row behind the other. PATH.idx is, little-endian and without
// padding:
//
//   "MMIDIDX\0\0", uint64 version 1, uint8 dtype, uint64 rows, uint64 documents,
//   int32 elements of each row, int64 byte in PATH.bin where each row begins, int64 documents
//
// Files are what somebody else wrote: every number that leads to another one is checked before it is used. Torch-free.
#pragma once

#include <cstdint>
#include <string>

#include "core/files/mapped_file.h"

namespace ds::efficiency {

// One dataset. The files are mapped, and read where they are touched. May be used from any thread.
class IndexedDataset {
 public:
  // `path` without .bin and .idx. Throws IoError that names the file, what was expected and what was found.
  explicit IndexedDataset(std::string path);

  const std::string& path() const { return path_; }
  int64_t rows() const { return rows_; }
  int64_t elements() const { return elements_; }
  // Returns where a row begins among all elements; for rows(), where the last one ends.
  int64_t begin_of(int64_t row) const;
  // Throws IoError for a number beyond int64.
  int64_t element(int64_t place) const;

 private:
  void read_header();
  // Takes up Megatron-LM's code of uint16, where an element has two bytes.
  void recognise_megatron();
  void check_rows();
  [[noreturn]] void wrong(const char* file, const std::string& what) const;

  std::string path_;
  MappedFile index_;
  MappedFile data_;
  int dtype_ = 0;
  int64_t element_bytes_ = 0;
  int64_t rows_ = 0;
  int64_t elements_ = 0;
};

}  // namespace ds::efficiency
