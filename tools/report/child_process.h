// Runs a program for its output, with a time limit.
#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace ds::tool::report {

struct Finished {
  bool fine = false;   // ended with exit code 0
  std::string ending;  // otherwise how: "exit code 3", "killed by signal 11 (Segmentation fault)", "still running ..."
  std::string out, err;
};

// Runs words[0], a path, with this process's environment and no input; kills it at the limit. Throws nothing: what
// cannot be started is an ending too.
Finished run_child(const std::vector<std::string>& words, std::chrono::milliseconds limit);

// The last line that is not empty, for one-line reasons.
std::string last_line(const std::string& text);

}  // namespace ds::tool::report
