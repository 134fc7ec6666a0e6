#include "launcher/ranks/failure_report.h"

#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstddef>
#include <filesystem>
#include <string_view>

#include "core/flight_job.h"
#include "core/text.h"
#include "launcher/command_line/core_list.h"
#include "launcher/command_line/shell_words.h"
#include "launcher/processes/exit_cause.h"
#include "launcher/program/rank_environment.h"

namespace ds::launcher {
namespace {

namespace fs = std::filesystem;
using namespace std::string_view_literals;

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

bool tells_of_another_rank(const LastLines& lines) {
  // The texts of comm/shared_memory, gloo, NCCL and the store of the rendezvous, and those of calls in which another
  // rank has failed: "rank 0 could not write ..., its message says why".
  constexpr std::array kTexts = {" has destroyed its communicator"sv,
                                 " has died"sv,
                                 " failed before: "sv,
                                 " message says why"sv,
                                 " error says why"sv,
                                 " message says which"sv,
                                 "Connection closed by peer"sv,
                                 "Connection reset by peer"sv,
                                 "Broken pipe"sv,
                                 "remote process exited or there was a"sv};
  constexpr size_t kLooked = 5;  // an error has its text in its last lines
  const size_t skipped = lines.lines().size() - std::min(lines.lines().size(), kLooked);
  return std::any_of(lines.lines().begin() + static_cast<std::ptrdiff_t>(skipped), lines.lines().end(),
                     [&](const std::string& line) {
                       return std::any_of(kTexts.begin(), kTexts.end(),
                                          [&](std::string_view text) { return line.find(text) != std::string::npos; });
                     });
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

std::string flight_folder(const std::vector<std::string>& environment) {
  const auto variable = [&](const char* name) { return environment_value(environment, name); };
  return fs::path(flight_base(variable)) / variable(kFlightJobVariable).value_or("");
}

std::vector<std::string> flight_lines(const std::string& folder, const std::string& host) {
  std::error_code error;  // none there, or not ours
  if (fs::directory_iterator(folder, error) == fs::directory_iterator()) return {};
  return {
      cat("what the ranks", host.empty() ? "" : cat(" on ", host), " did last: ds-tool explain ", shell_word(folder))};
}

}  // namespace ds::launcher
