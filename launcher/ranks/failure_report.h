// The text that the user reads when a rank failed or died, which launcher/processes/rank_processes.cc notices. Which
// rank is to blame is decided in job.cc: Note [Who failed first] (job.h). Pure, but for flight_lines().
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

// The cause of a failure in one line: "rank 3 (pid 4711) failed: killed by SIGSEGV (...); peak memory 1.2 GiB".
std::string cause_line(const Failure& failure);

// Whether the last lines tell of nothing but another rank's end: a collective that cannot finish because a peer has
// left, died or failed, or a call in which a peer has failed. Such a failure follows from that of the other rank.
bool tells_of_another_rank(const LastLines& lines);

// The last lines of the rank, under a heading, indented.
std::vector<std::string> last_lines_report(const Failure& failure, const LastLines& lines);

// A list of ranks as text: "ranks 0-2, 5" or "rank 7".
std::string rank_list_text(const std::vector<int>& ranks);

// The folder of the flight records of ranks with this environment; see core/flight_job.h. Pure, but for the user's id
// and whether the temporary folder is there.
std::string flight_folder(const std::vector<std::string>& environment);

// Lines that tell the user how to see what the ranks did last; none where they have left no records in `folder`.
// `host`: what messages call this machine; empty: the only one.
std::vector<std::string> flight_lines(const std::string& folder, const std::string& host);

}  // namespace ds::launcher
