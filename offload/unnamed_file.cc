#include "offload/unnamed_file.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <system_error>

#include "core/check.h"
#include "core/system_call.h"

namespace ds::offload {
namespace {

std::string gigabytes(int64_t bytes) {
  return cat(bytes, " bytes (", fixed(static_cast<double>(bytes) / 1e9, 3), " GB)");
}

void require_disk_folder(const std::string& folder, const std::string& what) {
  std::error_code error;
  const auto status = std::filesystem::status(folder, error);
  require<ConfigError>(std::filesystem::exists(status), what, ": expected an existing folder on a local disk, found \"",
                       folder, "\" (", error ? SystemReason(error) : SystemReason(ENOENT),
                       "); make the folder on every node");
  require<ConfigError>(std::filesystem::is_directory(status), what, ": expected a folder, found \"", folder,
                       "\", which is something else; name a folder on a local disk");
  struct statfs system {};
  require_system<ConfigError>(::statfs(folder.c_str(), &system) == 0, what, ": cannot look at \"", folder, "\"");
  require<ConfigError>(system.f_type != TMPFS_MAGIC && system.f_type != RAMFS_MAGIC, what,
                       ": expected a folder on a disk, found \"", folder,
                       "\" in a file system that lives in memory (tmpfs or ramfs); name a folder on a local disk, or "
                       "set the device to \"cpu\" to keep the state in memory");
}

UniqueFd make_without_name(const std::string& path, const std::string& folder, const std::string& what) {
  UniqueFd descriptor;
  for (int attempt = 0; attempt < 2 && !descriptor.valid(); ++attempt) {
    descriptor = UniqueFd(::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_DIRECT | O_CLOEXEC, 0600));
    if (descriptor.valid() || errno != EEXIST) break;
    ::unlink(path.c_str());  // left by a process that was killed between its open and its unlink
  }
  const int error = errno;
  if (!descriptor.valid() && error == EINVAL) {
    ::unlink(path.c_str());  // some file systems make the file and then refuse O_DIRECT
    throw ConfigError(
        cat(what, ": the file system of \"", folder,
            "\" has no direct IO (O_DIRECT), which would fill the page cache with what is offloaded; name "
            "a folder on a local disk (ext4, xfs)"));
  }
  require<ConfigError>(descriptor.valid(), what, ": cannot make a file in \"", folder, "\": ", SystemReason(error),
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
  require<ConfigError>(static_cast<rlim_t>(bytes) <= limit.rlim_cur, what, ": a file of ",
                       lazy([&] { return gigabytes(bytes); }), " is too large for \"", folder,
                       "\": this process may write ", limit.rlim_cur,
                       " bytes (RLIMIT_FSIZE); raise `ulimit -f`, or use more ranks");
}

void reserve(int descriptor, const std::string& folder, int64_t bytes, const std::string& what) {
  struct statvfs space {};
  require_system<ConfigError>(::fstatvfs(descriptor, &space) == 0, what, ": cannot look at \"", folder, "\"");
  const auto free = static_cast<int64_t>(space.f_bavail) * static_cast<int64_t>(space.f_frsize);
  const auto too_little = [&](const std::string& why) {
    return cat(what, ": \"", folder, "\" has too little space: needed ", gigabytes(bytes), " for this rank, free ",
               gigabytes(free), why, "; free some, name a folder on a larger disk, or use more ranks");
  };
  require<ConfigError>(bytes <= free, lazy([&] { return too_little(""); }));
  int error = 0;
  do {
    error = ::fallocate(descriptor, 0, 0, bytes) == 0 ? 0 : errno;
  } while (error == EINTR);
  require<ConfigError>(error != ENOSPC && error != EDQUOT,
                       lazy([&] { return too_little(cat(" (", SystemReason(error), ")")); }));
  const auto size = lazy([&] { return gigabytes(bytes); });
  require<ConfigError>(error != EOPNOTSUPP, what, ": the file system of \"", folder,
                       "\" cannot reserve space (fallocate); name a folder on a local disk (ext4, xfs)");
  require<ConfigError>(error != EFBIG, what, ": a file of ", size, " is too large for \"", folder,
                       "\": ", SystemReason(error), "; raise `ulimit -f`, or use more ranks");
  require<ConfigError>(error == 0, what, ": cannot reserve ", size, " in \"", folder, "\": ", SystemReason(error));
}

}  // namespace

UnnamedFile::UnnamedFile(const std::string& folder, const std::string& name, int64_t bytes, int64_t alignment,
                         const std::string& what)
    : path_((std::filesystem::path(folder) / cat(name, ".", ::getpid())).string()) {
  require_disk_folder(folder, what);
  descriptor_ = make_without_name(path_, folder, what);
  require_alignment(descriptor_.get(), folder, alignment, what);
  require_file_size(folder, bytes, what);
  if (bytes > 0) reserve(descriptor_.get(), folder, bytes, what);
}

}  // namespace ds::offload
