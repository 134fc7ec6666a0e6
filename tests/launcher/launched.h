// A running ds-launch, for tests: started with its output in files, waited for with a time limit, killed at the end.
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "tests/support/scratch_folder.h"

namespace ds::launcher::testing {

using TemporaryFolder = test::ScratchFolder;

std::string read_file(const std::filesystem::path& path);

// Polls until the condition holds; false after `seconds`.
bool wait_until(const std::function<bool()>& condition, double seconds = 30);

bool exists(const std::string& path);
pid_t pid_in(const std::string& path);
bool process_gone(pid_t pid);  // a zombie counts as gone

class Launched {
 public:
  struct Settings {
    std::vector<std::string> flags = {};
    std::vector<std::string> actions = {};  // of the rank program
    std::vector<std::string> program = {DS_RANK_PROGRAM};
    std::vector<std::string> environment = {};  // added to the test's own
    std::string input = "/dev/null";
    int terminal = -1;  // standard output and error, instead of files
    bool hangup_ignored = false;
    bool child_ends_ignored = false;  // SIGCHLD, as some daemons and scripts start their children
  };
  explicit Launched(const Settings& settings);
  Launched(const Launched&) = delete;
  Launched& operator=(const Launched&) = delete;
  ~Launched();

  // The exit code, -signal when a signal ended it, or kHung after `seconds` (then it is killed).
  static constexpr int kHung = -1000;
  int wait(double seconds = 60);
  void send(int signal) const;
  pid_t pid() const { return pid_; }
  std::string out() const { return read_file(folder_ / "out"); }
  std::string err() const { return read_file(folder_ / "err"); }

 private:
  TemporaryFolder folder_;
  pid_t pid_ = -1;
};

}  // namespace ds::launcher::testing
