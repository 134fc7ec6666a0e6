#include "core/files/regular_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "core/system_call.h"
#include "core/text.h"
#include "core/unique_fd.h"

namespace ds {
namespace {

const char* kind_of(mode_t mode) {
  switch (mode & S_IFMT) {
    case S_IFDIR:
      return "a folder";
    case S_IFIFO:
      return "a pipe (fifo), which may never end; write its text to a file first";
    case S_IFSOCK:
      return "a socket";
    case S_IFCHR:
    case S_IFBLK:
      return "a device, which may never end";
    default:
      return "something else";
  }
}

std::string size_text(size_t bytes) {
  constexpr size_t kMebibyte = 1 << 20;
  return bytes % kMebibyte == 0 ? cat(bytes / kMebibyte, " MiB") : cat(bytes, " bytes");
}

}  // namespace

FileText read_regular_file(const std::string& path, size_t most) {
  FileText result;
  const auto fail = [&](const std::string& trouble) {
    result.text.clear();
    result.trouble = trouble;
    return result;
  };
  const auto fail_by_system = [&](const char* what) {
    const int error = errno;
    return fail(cat(what, ": ", SystemReason(error)));
  };
  // Without O_NONBLOCK opening a fifo would wait for a writer.
  const UniqueFd file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!file.valid()) return fail_by_system("cannot be opened");
  struct stat facts = {};
  if (fstat(file.get(), &facts) != 0) return fail_by_system("cannot be read");
  if (!S_ISREG(facts.st_mode)) return fail(cat("expected a file, found ", kind_of(facts.st_mode)));
  const std::string too_long = cat("expected at most ", size_text(most), ", found ");
  if (static_cast<size_t>(facts.st_size) > most) return fail(cat(too_long, facts.st_size, " bytes"));
  // The size counts for nothing where the kernel makes the text (/proc), or another process still writes it.
  constexpr size_t kPiece = 64 << 10;
  while (result.text.size() <= most) {
    const size_t before = result.text.size();
    result.text.resize(before + kPiece);
    const ssize_t got = read(file.get(), result.text.data() + before, kPiece);
    result.text.resize(before + static_cast<size_t>(std::max<ssize_t>(got, 0)));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return fail_by_system("cannot be read");
    if (got == 0) return result;
  }
  return fail(cat(too_long, "more"));
}

}  // namespace ds
