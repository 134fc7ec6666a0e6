// A file for direct IO that has space but no name: it vanishes with the process, however that ends. Torch-free.
#pragma once

#include <cstdint>
#include <string>

#include "core/unique_fd.h"

namespace ds::offload {

// Owns the descriptor. Not copyable.
class UnnamedFile {
 public:
  // Makes `folder`/`name`.PID, takes the name away again at once, so that nothing is left behind even after kill -9,
  // and reserves `bytes`, which read as zeros without being written. `what` names the setting that `folder` comes from,
  // for example "zero_optimization.offload_optimizer.nvme_path". Throws ConfigError when the folder does not exist, is
  // no folder, cannot be written, is memory (tmpfs, ramfs), has no direct IO (O_DIRECT) in blocks of `alignment` bytes,
  // cannot reserve space, or has too little of it; when RLIMIT_FSIZE forbids such a file.
  UnnamedFile(const std::string& folder, const std::string& name, int64_t bytes, int64_t alignment,
              const std::string& what);
  UnnamedFile(const UnnamedFile&) = delete;
  UnnamedFile& operator=(const UnnamedFile&) = delete;

  int descriptor() const { return descriptor_.get(); }
  // The path it was made under, for messages.
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  UniqueFd descriptor_;
};

}  // namespace ds::offload
