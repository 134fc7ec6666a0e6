#include "comm/shared_memory/shared_region.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <csignal>
#include <ctime>
#include <filesystem>
#include <system_error>

#include "core/check.h"
#include "core/system_call.h"
#include "core/unique_fd.h"

namespace ds::comm {
namespace {

constexpr const char* kSharedMemoryFolder = "/dev/shm";
constexpr std::time_t kLeftOverSeconds = 3600;

std::string free_shared_memory() {
  struct statvfs info {};
  if (statvfs(kSharedMemoryFolder, &info) != 0) return "unknown";
  return std::to_string(static_cast<uint64_t>(info.f_bavail) * info.f_frsize);
}

int reserve(int descriptor, size_t bytes) {
  int error = 0;
  do {
    error = posix_fallocate(descriptor, 0, static_cast<off_t>(bytes));
  } while (error == EINTR);
  return error;
}

}  // namespace

std::shared_ptr<SharedRegion> SharedRegion::anonymous(size_t bytes) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  require_system<CommError>(data != MAP_FAILED, "cannot map ", bytes, " bytes for ranks as threads");
  return std::shared_ptr<SharedRegion>(new SharedRegion(static_cast<std::byte*>(data), bytes, false));
}

std::shared_ptr<SharedRegion> SharedRegion::map(int descriptor, size_t bytes, const std::string& name) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  require_system<CommError>(data != MAP_FAILED, "cannot map ", bytes, " bytes of shared memory ", name);
  return std::shared_ptr<SharedRegion>(new SharedRegion(static_cast<std::byte*>(data), bytes, true));
}

std::shared_ptr<SharedRegion> SharedRegion::create(const std::string& name, size_t bytes) {
  const UniqueFd file(shm_open(name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  require_system<CommError>(file.valid(), "cannot create shared memory ", name);
  try {
    require_system<CommError>(ftruncate(file.get(), static_cast<off_t>(bytes)) == 0, "cannot size shared memory ", name,
                              " to ", bytes, " bytes");
    const int error = reserve(file.get(), bytes);
    require<CommError>(error == 0, "shared memory between the ranks of this host needs ", bytes,
                       " bytes in /dev/shm, free are ", lazy(free_shared_memory), " (", SystemReason(error),
                       "); enlarge /dev/shm (docker: --shm-size or --ipc=host) or set \"communication_backend\": "
                       "\"gloo\"");
    return map(file.get(), bytes, name);
  } catch (...) {
    remove_name(name);
    throw;
  }
}

std::shared_ptr<SharedRegion> SharedRegion::attach(const std::string& name, size_t bytes) {
  const UniqueFd file(shm_open(name.c_str(), O_RDWR | O_CLOEXEC, 0));
  require<CommError>(file.valid(), "cannot open shared memory ", name, ": ", SystemReason(errno),
                     "; all ranks must run on one host, as one user, and see the same /dev/shm");
  struct stat info {};
  require_system<CommError>(fstat(file.get(), &info) == 0, "cannot examine shared memory ", name);
  require<CommError>(info.st_uid == geteuid(), "shared memory ", name, " is that of user ", info.st_uid,
                     ", expected this user's, ", geteuid(), ": somebody else has made it");
  require<CommError>(static_cast<size_t>(info.st_size) == bytes, "shared memory ", name, ": expected ", bytes,
                     " bytes, found ", info.st_size, "; all ranks must run the same version of dsengine");
  return map(file.get(), bytes, name);
}

void SharedRegion::remove_left_over(const std::string& prefix) noexcept {
  std::error_code error;
  for (std::filesystem::directory_iterator file(kSharedMemoryFolder, error), end; !error && file != end;
       file.increment(error)) {
    const std::string name = std::string("/").append(file->path().filename().string());
    if (!name.starts_with(prefix)) continue;
    pid_t maker = 0;
    std::from_chars(name.data() + prefix.size(), name.data() + name.size(), maker);
    struct stat info {};
    if (maker <= 0 || lstat(file->path().c_str(), &info) != 0 || info.st_uid != geteuid()) continue;
    if (std::time(nullptr) - info.st_mtime < kLeftOverSeconds || kill(maker, 0) == 0 || errno != ESRCH) continue;
    remove_name(name);
  }
}

void SharedRegion::remove_name(const std::string& name) noexcept { shm_unlink(name.c_str()); }

SharedRegion::~SharedRegion() { munmap(data_, bytes_); }

std::shared_ptr<SharedRegion> PosixRegionDirectory::create(const std::string& name, size_t bytes) {
  return SharedRegion::create(name, bytes);
}

std::shared_ptr<SharedRegion> PosixRegionDirectory::attach(const std::string& name, size_t bytes) {
  return SharedRegion::attach(name, bytes);
}

void PosixRegionDirectory::seal(const std::string& name) noexcept { SharedRegion::remove_name(name); }

std::shared_ptr<SharedRegion> ThreadRegionDirectory::create(const std::string& name, size_t bytes) {
  auto region = SharedRegion::anonymous(bytes);
  const std::lock_guard lock(mutex_);
  require<CommError>(regions_.emplace(name, region).second, "the region ", name, " exists already");
  return region;
}

std::shared_ptr<SharedRegion> ThreadRegionDirectory::attach(const std::string& name, size_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto found = regions_.find(name);
  require<CommError>(found != regions_.end() && found->second->bytes() == bytes, "no region ", name, " of ", bytes,
                     " bytes");
  return found->second;
}

void ThreadRegionDirectory::seal(const std::string& name) noexcept {
  const std::lock_guard lock(mutex_);
  regions_.erase(name);
}

}  // namespace ds::comm
