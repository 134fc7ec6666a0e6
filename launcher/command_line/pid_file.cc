#include "launcher/command_line/pid_file.h"

#include <fcntl.h>
#include <unistd.h>

#include "core/system_call.h"
#include "core/unique_fd.h"

namespace ds::launcher {

std::string pid_file_path() { return cat("/tmp/", getpid(), ".deepspeed"); }

PidFile::PidFile(const std::string& path) : path_(path) {
  if (path_.empty()) return;
  const UniqueFd file(open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
  require_system<IoError>(file.valid(), "--save_pid: cannot make ", path_);
  const std::string text = cat(getpid(), '\n');
  const bool written = write(file.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size());
  require_system<IoError>(written, "--save_pid: cannot write ", path_);
}

PidFile::~PidFile() {
  if (!path_.empty()) unlink(path_.c_str());
}

}  // namespace ds::launcher
