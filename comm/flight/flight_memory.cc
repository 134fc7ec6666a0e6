#include "comm/flight/flight_memory.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <system_error>
#include <utility>

#include "core/system_call.h"

namespace ds::comm {
namespace {

// Whether the path still leads to the open file: its last owner may have removed it.
bool leads_to(const std::string& file, int descriptor) {
  struct stat named {};
  struct stat opened {};
  return stat(file.c_str(), &named) == 0 && fstat(descriptor, &opened) == 0 && named.st_dev == opened.st_dev &&
         named.st_ino == opened.st_ino;
}

// Locks the file. False: somebody else has the lock.
bool lock(int descriptor) { return flock(descriptor, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK; }

UniqueFd open_locked(const std::string& file) {
  for (;;) {
    UniqueFd descriptor(open(file.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600));
    require_system<IoError>(descriptor.valid(), file, ": cannot be made, or is a link, which may lead anywhere");
    const bool in_use = !lock(descriptor.get());
    if (!in_use && leads_to(file, descriptor.get())) return descriptor;
    require<FlightFileInUse>(!in_use, file, ": is the flight record of a job that still runs");
  }
}

}  // namespace

bool FlightMemory::is_in_use(const std::string& file) {
  const UniqueFd descriptor(open(file.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW));
  if (!descriptor.valid()) return errno != ENOENT;
  return !lock(descriptor.get());
}

FlightMemory::FlightMemory(std::string file, size_t size) : file_(std::move(file)), size_(size) {
  const auto fail = [this](const std::string& what, int error) {
    if (descriptor_.valid()) unlink(file_.c_str());
    throw IoError(cat(file_, ": ", what, ": ", SystemReason(error)));
  };
  if (!file_.empty()) {
    descriptor_ = open_locked(file_);
    int error = ftruncate(descriptor_.get(), 0) == 0 ? 0 : errno;
    if (error == 0) error = posix_fallocate(descriptor_.get(), 0, static_cast<off_t>(size));
    if (error != 0) fail(cat("no room for the ", size, " bytes of a flight record"), error);
  }
  data_ = mmap(nullptr, size, PROT_READ | PROT_WRITE, descriptor_.valid() ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS,
               descriptor_.get(), 0);
  if (data_ == MAP_FAILED) fail("cannot be mapped", errno);
}

FlightMemory::~FlightMemory() {
  munmap(data_, size_);
  if (!descriptor_.valid() || keep_ || !process_.is_this()) return;  // Note [Forked children]
  unlink(file_.c_str());
  std::error_code others_are_there;
  std::filesystem::remove(std::filesystem::path(file_).parent_path(), others_are_there);
}

}  // namespace ds::comm
