#include "comm/flight/flight_memory.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

namespace ds::comm {
namespace {

// Whether the path still leads to the open file: its last owner may have removed it.
bool leads_to(const std::string& file, int descriptor) {
  struct stat named {};
  struct stat opened {};
  return stat(file.c_str(), &named) == 0 && fstat(descriptor, &opened) == 0 && named.st_dev == opened.st_dev &&
         named.st_ino == opened.st_ino;
}

// False: somebody else has it.
bool lock(int descriptor) { return flock(descriptor, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK; }

int open_locked(const std::string& file) {
  for (;;) {
    const int descriptor = open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    require<IoError>(descriptor >= 0, file, ": cannot be made: ", std::strerror(errno));
    const bool in_use = !lock(descriptor);
    if (!in_use && leads_to(file, descriptor)) return descriptor;
    close(descriptor);
    require<FlightFileInUse>(!in_use, file, ": is the flight record of a job that still runs");
  }
}

}  // namespace

bool FlightMemory::is_in_use(const std::string& file) {
  const int descriptor = open(file.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW);
  if (descriptor < 0) return errno != ENOENT;
  const bool in_use = !lock(descriptor);
  close(descriptor);
  return in_use;
}

FlightMemory::FlightMemory(std::string file, size_t size) : file_(std::move(file)), size_(size) {
  const auto fail = [this](const std::string& what, int error) {
    if (descriptor_ >= 0) {
      unlink(file_.c_str());
      close(descriptor_);
    }
    throw IoError(cat(file_, ": ", what, ": ", std::strerror(error)));
  };
  if (!file_.empty()) {
    descriptor_ = open_locked(file_);
    int error = ftruncate(descriptor_, 0) == 0 ? 0 : errno;
    if (error == 0) error = posix_fallocate(descriptor_, 0, static_cast<off_t>(size));
    if (error != 0) fail(cat("no room for the ", size, " bytes of a flight record"), error);
  }
  data_ = mmap(nullptr, size, PROT_READ | PROT_WRITE, descriptor_ < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED,
               descriptor_, 0);
  if (data_ == MAP_FAILED) fail("cannot be mapped", errno);
}

FlightMemory::~FlightMemory() {
  munmap(data_, size_);
  if (descriptor_ < 0) return;
  if (!keep_) {
    unlink(file_.c_str());
    std::error_code others_are_there;
    std::filesystem::remove(std::filesystem::path(file_).parent_path(), others_are_there);
  }
  close(descriptor_);
}

}  // namespace ds::comm
