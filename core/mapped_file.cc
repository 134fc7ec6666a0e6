#include "core/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "core/check.h"

namespace ds {
namespace {

[[noreturn]] void fail(const std::string& path, const char* what, int error) {
  throw IoError(cat(path, ": ", what, ": ", std::generic_category().message(error)));
}

}  // namespace

MappedFile::MappedFile(const std::string& path) {
  const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) fail(path, "cannot open", errno);
  struct stat status {};
  if (fstat(descriptor, &status) != 0 || !S_ISREG(status.st_mode)) {
    close(descriptor);
    throw IoError(cat(path, ": expected a regular file"));
  }
  size_ = static_cast<size_t>(status.st_size);
  void* mapped =
      size_ == 0 ? nullptr : mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, descriptor, 0);
  const int error = errno;
  close(descriptor);
  if (mapped == MAP_FAILED) fail(path, "cannot map", error);
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
