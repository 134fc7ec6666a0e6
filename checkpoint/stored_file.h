// A file that is read in parts at given positions. Torch-free.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/unique_fd.h"

namespace ds::checkpoint {

// Opened with the first read. Safe to move; reads by one thread at a time.
class StoredFile {
 public:
  // Throws IoError when there is no such file.
  explicit StoredFile(std::string path);
  StoredFile(StoredFile&& other) noexcept = default;
  StoredFile& operator=(StoredFile&&) = delete;

  const std::string& path() const { return path_; }
  uint64_t bytes() const { return bytes_; }
  // Throws IoError when the file ends before.
  void read(uint64_t position, void* to, size_t bytes);
  // Closes the file until the next read: a checkpoint may have more files than a process may open.
  void close() noexcept { descriptor_.reset(); }

 private:
  std::string path_;
  uint64_t bytes_ = 0;
  UniqueFd descriptor_;
};

// More than any index has, and its header: what claims to be more is damaged, or made to fill the memory.
inline constexpr uint64_t kMostIndexBytes = uint64_t{1} << 30;

// All of a small file. Throws IoError, also for one of more than `most` bytes.
std::string read_text(const std::string& path, uint64_t most = kMostIndexBytes);

}  // namespace ds::checkpoint
