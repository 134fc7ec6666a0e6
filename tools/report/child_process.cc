#include "tools/report/child_process.h"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>

#include "core/text.h"
#include "launcher/processes/pipe.h"

extern char** environ;

namespace ds::tool::report {
namespace {

using Clock = std::chrono::steady_clock;
using launcher::Pipe;

pid_t start(const std::vector<std::string>& words, const Pipe& out, const Pipe& err, int& error) {
  std::vector<char*> arguments;
  for (const std::string& word : words) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_adddup2(&actions, out.writer.get(), STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, err.writer.get(), STDERR_FILENO);
  pid_t child = -1;
  error = ::posix_spawn(&child, words[0].c_str(), &actions, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  return error == 0 ? child : -1;
}

// False at the time limit.
bool read_until_closed(const Pipe& out, const Pipe& err, Finished& result, Clock::time_point end) {
  std::array<pollfd, 2> open{{{out.reader.get(), POLLIN, 0}, {err.reader.get(), POLLIN, 0}}};
  while (open[0].fd >= 0 || open[1].fd >= 0) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now()).count();
    if (left <= 0) return false;
    if (::poll(open.data(), open.size(), static_cast<int>(left)) < 0 && errno != EINTR) return false;
    for (size_t i = 0; i < open.size(); ++i) {
      if (open[i].fd < 0 || open[i].revents == 0) continue;
      std::array<char, 4096> part{};
      const ssize_t count = ::read(open[i].fd, part.data(), part.size());
      if (count > 0) (i == 0 ? result.out : result.err).append(part.data(), static_cast<size_t>(count));
      if (count <= 0) open[i].fd = -1;
    }
  }
  return true;
}

// Waits for a child that has closed its output, up to the limit.
bool has_ended(pid_t child, int& status, Clock::time_point end) {
  while (true) {
    const pid_t ended = ::waitpid(child, &status, WNOHANG);
    if (ended == child) return true;
    if ((ended < 0 && errno != EINTR) || Clock::now() > end) return false;
    ::usleep(1000);
  }
}

std::string ending_of(int status) {
  if (WIFSIGNALED(status)) return cat("killed by signal ", WTERMSIG(status), " (", ::strsignal(WTERMSIG(status)), ")");
  return WEXITSTATUS(status) == 0 ? "" : cat("exit code ", WEXITSTATUS(status));
}

}  // namespace

Finished run_child(const std::vector<std::string>& words, std::chrono::milliseconds limit) {
  Finished result;
  Pipe out = launcher::open_pipe(), err = launcher::open_pipe();
  if (!out.valid() || !err.valid()) {
    result.ending = cat("cannot be started: ", std::strerror(errno));
    return result;
  }
  int error = 0;
  const pid_t child = start(words, out, err, error);
  out.writer.reset();
  err.writer.reset();
  if (child < 0) {
    result.ending = cat("cannot be started: ", std::strerror(error));
    return result;
  }
  const auto end = Clock::now() + limit;
  int status = 0;
  if (read_until_closed(out, err, result, end) && has_ended(child, status, end)) {
    result.ending = ending_of(status);
    result.fine = result.ending.empty();
    return result;
  }
  ::kill(child, SIGKILL);
  ::waitpid(child, &status, 0);
  result.ending = cat("still running after ", fixed(static_cast<double>(limit.count()) / 1000, 1), " s, killed");
  return result;
}

std::string last_line(const std::string& text) {
  const size_t end = text.find_last_not_of("\r\n \t");
  if (end == std::string::npos) return {};
  const size_t begin = text.find_last_of('\n', end);
  return text.substr(begin == std::string::npos ? 0 : begin + 1,
                     end - (begin == std::string::npos ? 0 : begin + 1) + 1);
}

}  // namespace ds::tool::report
