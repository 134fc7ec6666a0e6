// Writes a file so that readers see the old one or the complete new one, never a part. Torch-free.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "core/making_process.h"
#include "core/unique_fd.h"

namespace ds {

// Writes beside `path` under a temporary name; commit() makes it durable (fsync), if asked to, and renames it to
// `path`. Destroyed without commit(), it leaves nothing behind and `path` as it was. Not thread safe.
class AtomicFile {
 public:
  // Throws IoError when the file cannot be created: also a way to find out early whether `path` can be written.
  explicit AtomicFile(std::string path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  // Appends. Throws IoError, for example when the disk is full.
  void write(const void* data, size_t bytes);
  // Writes at a position from the start of the file, in any order; does not move where write() appends.
  void write_at(size_t position, const void* data, size_t bytes);
  // Renames the file to `path`. Without `durable` a crash of the machine, unlike one of the program, may lose the
  // contents.
  void commit(bool durable = true);

 private:
  [[noreturn]] void fail_closed(const char* what) const;  // with errno; the temporary file goes
  [[noreturn]] void fail(const char* what, int error) const;

  std::string path_;
  std::string temporary_;
  UniqueFd descriptor_;  // none once committed
  size_t end_ = 0;       // where write() appends
  MakingProcess process_;
};

// Makes `content` all of the file at `path`.
void write_whole_file(const std::string& path, std::string_view content, bool durable = true);

// Makes created, renamed and removed names in a folder durable. Returns 0, or the system's error number.
int sync_folder(const std::string& folder) noexcept;

}  // namespace ds
