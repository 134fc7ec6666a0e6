// A file mapped into memory: read on first touch, shared by all processes that map it. Torch-free.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace ds {

// A mapping that is read-only for other processes: what is written to its memory (possible, so that a stray write is no
// crash) stays in this one. Valid while the object lives. Safe for concurrent readers.
class MappedFile {
 public:
  // Throws IoError naming the path and the system's reason. An empty file maps to an empty span.
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;

  std::span<uint8_t> bytes() const { return {data_, size_}; }

 private:
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace ds
