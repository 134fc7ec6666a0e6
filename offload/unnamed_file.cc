#include "offload/unnamed_file.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "core/check.h"

namespace ds::offload {
namespace {

std::string system_text(int error) { return std::generic_category().message(error); }

std::string gigabytes(int64_t bytes) {
  return cat(bytes, " bytes (", fixed(static_cast<double>(bytes) / 1e9, 3), " GB)");
}

void require_disk_folder(const std::string& folder, const std::string& what) {
  std::error_code error;
  const auto status = std::filesystem::status(folder, error);
  require<ConfigError>(std::filesystem::exists(status), what, ": expected an existing folder on a local disk, found \"",
                       folder, "\" (", error ? error.message() : system_text(ENOENT),
                       "); make the folder on every node");
  require<ConfigError>(std::filesystem::is_directory(status), what, ": expected a folder, found \"", folder,
                       "\", which is something else; name a folder on a local disk");
  struct statfs system {};
  require<ConfigError>(::statfs(folder.c_str(), &system) == 0, what, ": cannot look at \"", folder,
                       "\": ", system_text(errno));
  require<ConfigError>(system.f_type != TMPFS_MAGIC && system.f_type != RAMFS_MAGIC, what,
                       ": expected a folder on a disk, found \"", folder,
                       "\" in a file system that lives in memory (tmpfs or ramfs); name a folder on a local disk, or "
                       "set the device to \"cpu\" to keep the state in memory");
}

int make_without_name(const std::string& path, const std::string& folder, const std::string& what) {
  int descriptor = -1;
  for (int attempt = 0; attempt < 2 && descriptor < 0; ++attempt) {
    descriptor = ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_DIRECT | O_CLOEXEC, 0600);
    if (descriptor >= 0 || errno != EEXIST) break;
    ::unlink(path.c_str());  // of a process that was killed between its open and its unlink
  }
  const int error = errno;
  if (descriptor < 0 && error == EINVAL) {
    ::unlink(path.c_str());  // some file systems make the file and then refuse O_DIRECT
    throw ConfigError(
        cat(what, ": the file system of \"", folder,
            "\" has no direct IO (O_DIRECT), which would fill the page cache with what is offloaded; name "
            "a folder on a local disk (ext4, xfs)"));
  }
  require<ConfigError>(descriptor >= 0, what, ": cannot make a file in \"", folder, "\": ", system_text(error),
                       "; name a folder on a local disk that this user may write");
  ::unlink(path.c_str());
  return descriptor;
}

void require_alignment(int descriptor, const std::string& folder, int64_t alignment, const std::string& what) {
#ifdef STATX_DIOALIGN
  struct statx status {};
  if (::statx(descriptor, "", AT_EMPTY_PATH, STATX_DIOALIGN, &status) != 0) return;
  if ((status.stx_mask & STATX_DIOALIGN) == 0) return;  // before Linux 6.1; a wrong alignment shows as EINVAL
  const int64_t memory = status.stx_dio_mem_align;
  const int64_t offset = status.stx_dio_offset_align;
  require<ConfigError>(memory > 0 && offset > 0, what, ": files in \"", folder,
                       "\" have no direct IO (O_DIRECT); name a folder on a local disk (ext4, xfs) that is not "
                       "compressed or encrypted by the file system");
  require<ConfigError>(alignment % memory == 0 && alignment % offset == 0, what,
                       ": expected a disk with blocks of at most ", alignment, " bytes, found direct IO in \"", folder,
                       "\" aligned to ", offset, " bytes in the file and ", memory,
                       " in memory; name a folder on another disk");
#endif
}

// Asked before: by default the kernel ends a process that goes beyond it (SIGXFSZ).
void require_file_size(const std::string& folder, int64_t bytes, const std::string& what) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return;
  require<ConfigError>(static_cast<rlim_t>(bytes) <= limit.rlim_cur, what, ": a file of ", gigabytes(bytes),
                       " is too large for \"", folder, "\": this process may write ", limit.rlim_cur,
                       " bytes (RLIMIT_FSIZE); raise `ulimit -f`, or use more ranks");
}

void reserve(int descriptor, const std::string& folder, int64_t bytes, const std::string& what) {
  struct statvfs space {};
  require<ConfigError>(::fstatvfs(descriptor, &space) == 0, what, ": cannot look at \"", folder,
                       "\": ", system_text(errno));
  const auto free = static_cast<int64_t>(space.f_bavail) * static_cast<int64_t>(space.f_frsize);
  const auto too_little = [&](const std::string& why) {
    return cat(what, ": \"", folder, "\" has too little space: needed ", gigabytes(bytes), " for this rank, free ",
               gigabytes(free), why, "; free some, name a folder on a larger disk, or use more ranks");
  };
  require<ConfigError>(bytes <= free, too_little(""));
  int error = 0;
  do {
    error = ::fallocate(descriptor, 0, 0, bytes) == 0 ? 0 : errno;
  } while (error == EINTR);
  require<ConfigError>(error != ENOSPC && error != EDQUOT, too_little(cat(" (", system_text(error), ")")));
  require<ConfigError>(error != EOPNOTSUPP, what, ": the file system of \"", folder,
                       "\" cannot reserve space (fallocate); name a folder on a local disk (ext4, xfs)");
  require<ConfigError>(error != EFBIG, what, ": a file of ", gigabytes(bytes), " is too large for \"", folder,
                       "\": ", system_text(error), "; raise `ulimit -f`, or use more ranks");
  require<ConfigError>(error == 0, what, ": cannot reserve ", gigabytes(bytes), " in \"", folder,
                       "\": ", system_text(error));
}

}  // namespace

UnnamedFile::UnnamedFile(const std::string& folder, const std::string& name, int64_t bytes, int64_t alignment,
                         const std::string& what)
    : path_((std::filesystem::path(folder) / cat(name, ".", ::getpid())).string()) {
  require_disk_folder(folder, what);
  descriptor_ = make_without_name(path_, folder, what);
  try {
    require_alignment(descriptor_, folder, alignment, what);
    require_file_size(folder, bytes, what);
    if (bytes > 0) reserve(descriptor_, folder, bytes, what);
  } catch (...) {
    ::close(descriptor_);
    throw;
  }
}

UnnamedFile::~UnnamedFile() { ::close(descriptor_); }

}  // namespace ds::offload
