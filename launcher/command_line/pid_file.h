// --save_pid: a file that holds the pid of a ds-launch as long as its job runs.
#pragma once

#include <string>

namespace ds::launcher {

// /tmp/PID.deepspeed, with the pid of this process. On other hosts the file has the name that the first ds-launch
// gives.
std::string pid_file_path();

class PidFile {
 public:
  // Writes the file; an empty path: none. Throws IoError when there is one already, or it cannot be made.
  explicit PidFile(const std::string& path);
  PidFile(const PidFile&) = delete;
  PidFile& operator=(const PidFile&) = delete;
  ~PidFile();  // removes it

 private:
  std::string path_;
};

}  // namespace ds::launcher
