#include "checkpoint/stored_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <system_error>
#include <utility>

#include "core/check.h"

namespace ds::checkpoint {

StoredFile::StoredFile(std::string path) : path_(std::move(path)) {
  std::error_code error;
  bytes_ = std::filesystem::file_size(path_, error);
  require<IoError>(!error, path_, ": expected a file, found none that can be read: ", error.message());
}

StoredFile::~StoredFile() { close(); }

void StoredFile::close() noexcept {
  if (descriptor_ >= 0) ::close(std::exchange(descriptor_, -1));
}

StoredFile::StoredFile(StoredFile&& other) noexcept
    : path_(std::move(other.path_)), bytes_(other.bytes_), descriptor_(std::exchange(other.descriptor_, -1)) {}

void StoredFile::read(uint64_t position, void* to, size_t bytes) {
  if (descriptor_ < 0) descriptor_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
  require<IoError>(descriptor_ >= 0, path_, ": cannot read: ", std::generic_category().message(errno));
  auto* next = static_cast<char*>(to);
  while (bytes > 0) {
    const ssize_t count = pread(descriptor_, next, bytes, static_cast<off_t>(position));
    if (count < 0 && errno == EINTR) continue;
    require<IoError>(count >= 0, path_, ": cannot read: ", std::generic_category().message(errno));
    require<IoError>(count > 0, path_, ": truncated: ends at byte ", position, ", expected ", bytes, " more");
    next += count;
    position += static_cast<uint64_t>(count);
    bytes -= static_cast<size_t>(count);
  }
}

std::string read_text(const std::string& path) {
  StoredFile file(path);
  std::string text(file.bytes(), '\0');
  file.read(0, text.data(), text.size());
  return text;
}

}  // namespace ds::checkpoint
