#include "checkpoint/stored_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <system_error>
#include <utility>

#include "core/check.h"
#include "core/system_call.h"

namespace ds::checkpoint {

StoredFile::StoredFile(std::string path) : path_(std::move(path)) {
  std::error_code error;
  bytes_ = std::filesystem::file_size(path_, error);
  require<IoError>(!error, path_, ": expected a file, found none that can be read: ", SystemReason(error));
}

void StoredFile::read(uint64_t position, void* to, size_t bytes) {
  if (!descriptor_.valid()) descriptor_ = UniqueFd(::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  require_system<IoError>(descriptor_.valid(), path_, ": cannot read");
  auto* next = static_cast<char*>(to);
  while (bytes > 0) {
    const ssize_t count = pread(descriptor_.get(), next, bytes, static_cast<off_t>(position));
    if (count < 0 && errno == EINTR) continue;
    require_system<IoError>(count >= 0, path_, ": cannot read");
    require<IoError>(count > 0, path_, ": truncated: ends at byte ", position, ", expected ", bytes, " more");
    next += count;
    position += static_cast<uint64_t>(count);
    bytes -= static_cast<size_t>(count);
  }
}

std::string read_text(const std::string& path, uint64_t most) {
  StoredFile file(path);
  require<IoError>(file.bytes() <= most, path, ": expected at most ", most, " bytes, found ", file.bytes());
  std::string text(file.bytes(), '\0');
  file.read(0, text.data(), text.size());
  return text;
}

}  // namespace ds::checkpoint
