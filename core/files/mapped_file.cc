#include "core/files/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <utility>

#include "core/check.h"
#include "core/system_call.h"
#include "core/unique_fd.h"

namespace ds {

MappedFile::MappedFile(const std::string& path) {
  // Without O_NONBLOCK opening a fifo would wait for a writer.
  const UniqueFd descriptor(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  require_system<IoError>(descriptor.valid(), path, ": cannot open");
  struct stat status {};
  require<IoError>(fstat(descriptor.get(), &status) == 0 && S_ISREG(status.st_mode), path, ": expected a regular file");
  size_ = static_cast<size_t>(status.st_size);
  void* mapped = size_ == 0
                     ? nullptr
                     : mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, descriptor.get(), 0);
  require_system<IoError>(mapped != MAP_FAILED, path, ": cannot map");
  data_ = static_cast<uint8_t*>(mapped);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) munmap(data_, size_);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

}  // namespace ds
