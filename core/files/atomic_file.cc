#include "core/files/atomic_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <utility>

#include "core/check.h"
#include "core/system_call.h"

namespace ds {

AtomicFile::AtomicFile(std::string path) : path_(std::move(path)), temporary_(cat(path_, ".", getpid(), ".tmp")) {
  require<IoError>(!std::filesystem::is_directory(path_), path_, ": cannot write: this is a folder; name a file");
  // The file may be of an earlier process with this number, or another user's, put there to own what is written.
  unlink(temporary_.c_str());
  descriptor_ = UniqueFd(open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (!descriptor_.valid()) fail("cannot write", errno);
}

AtomicFile::~AtomicFile() {
  if (!descriptor_.valid() || !process_.is_this()) return;  // Note [Forked children]
  descriptor_.reset();
  unlink(temporary_.c_str());
}

void AtomicFile::write(const void* data, size_t bytes) {
  write_at(end_, data, bytes);
  end_ += bytes;
}

void AtomicFile::write_at(size_t position, const void* data, size_t bytes) {
  const auto* next = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t written = pwrite(descriptor_.get(), next, bytes, static_cast<off_t>(position));
    if (written < 0) {
      if (errno == EINTR) continue;
      fail("cannot write", errno);
    }
    next += written;
    position += static_cast<size_t>(written);
    bytes -= static_cast<size_t>(written);
  }
}

void AtomicFile::commit(bool durable) {
  if (durable && fsync(descriptor_.get()) != 0) fail("cannot write", errno);
  // Over a network file system this is where a full disk shows.
  if (!descriptor_.close()) fail_closed("cannot write");
  if (rename(temporary_.c_str(), path_.c_str()) != 0) fail_closed("cannot rename the finished file into place");
  if (!durable) return;
  // The rename itself is durable once the folder is.
  sync_folder(std::filesystem::absolute(path_).parent_path().string());
}

int sync_folder(const std::string& folder) noexcept {
  const UniqueFd descriptor(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!descriptor.valid()) return errno;
  const int error = fsync(descriptor.get()) == 0 ? 0 : errno;
  return error == EINVAL ? 0 : error;  // a file system that needs none
}

void AtomicFile::fail_closed(const char* what) const {
  const int error = errno;
  unlink(temporary_.c_str());
  fail(what, error);
}

void AtomicFile::fail(const char* what, int error) const {
  throw IoError(cat(path_, ": ", what, ": ", SystemReason(error),
                    error == EFBIG ? "; raise the limit on the size of a file (`ulimit -f`)"
                                   : "; check that the folder exists, may be written and has space"));
}

void write_whole_file(const std::string& path, std::string_view content, bool durable) {
  AtomicFile file(path);
  file.write(content.data(), content.size());
  file.commit(durable);
}

}  // namespace ds
