// What the user reads when a rank failed. Pure.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "launcher/machine/oom_watch.h"
#include "launcher/ranks/line_reader.h"

namespace ds::launcher {

struct Failure {
  int rank = 0;      // among all ranks
  std::string host;  // empty: this machine is the only one
  pid_t pid = 0;
  int status = 0;  // as wait4() gives it
  int64_t peak_rss_bytes = 0;
  OomCounters before = {}, after = {};  // at the start of the job, and when the rank was found dead
};

// "rank 3 (pid 4711) failed: killed by SIGSEGV (...); peak memory 1.2 GiB".
std::string cause_line(const Failure& failure);

// The last lines of the rank, under a heading, indented.
std::vector<std::string> last_lines_report(const Failure& failure, const LastLines& lines);

// "ranks 0-2, 5" or "rank 7".
std::string rank_list_text(const std::vector<int>& ranks);

}  // namespace ds::launcher
