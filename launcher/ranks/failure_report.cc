#include "launcher/ranks/failure_report.h"

#include <sys/wait.h>

#include <csignal>

#include "core/text.h"
#include "launcher/command_line/core_list.h"
#include "launcher/processes/exit_cause.h"

namespace ds::launcher {
namespace {

// SIGKILL of the rank itself, or of the last command of a shell that is the rank.
bool was_killed(int status) { return exit_code_of(status) == 128 + SIGKILL; }

std::string killer(const Failure& failure) {
  if (!was_killed(failure.status)) return "";
  const std::string verdict = oom_verdict(failure.before, failure.after);
  if (!verdict.empty()) return " " + verdict;
  const bool counted = failure.after.group_kills || failure.after.host_kills;
  return cat(" by another process (kill -9, a batch system)", counted
                                                                  ? "; the kernel counted no out-of-memory kill"
                                                                  : " or for lack of memory: the kernel does not tell");
}

}  // namespace

std::string cause_line(const Failure& failure) {
  return cat("rank ", failure.rank, failure.host.empty() ? "" : cat(" on ", failure.host), " (pid ", failure.pid,
             ") failed: ", exit_words(failure.status), killer(failure), "; peak memory ",
             bytes_text(failure.peak_rss_bytes));
}

std::vector<std::string> last_lines_report(const Failure& failure, const LastLines& lines) {
  const size_t frames = lines.frames();
  if (lines.lines().empty()) {
    return {cat("rank ", failure.rank,
                frames == 0 ? " had written nothing" : cat(" had written ", frames, " stack frames and nothing else"))};
  }
  std::vector<std::string> report = {
      cat("last lines of rank ", failure.rank, frames == 0 ? "" : cat(" (without ", frames, " stack frames)"), ":")};
  for (const std::string& line : lines.lines()) report.push_back(cat("  | ", line));
  return report;
}

std::string rank_list_text(const std::vector<int>& ranks) {
  std::string list;
  for (char c : core_list_text(ranks)) list += c == ',' ? std::string(", ") : std::string(1, c);
  return cat(ranks.size() == 1 ? "rank " : "ranks ", list);
}

}  // namespace ds::launcher
