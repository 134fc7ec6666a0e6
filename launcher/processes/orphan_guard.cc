#include "launcher/processes/orphan_guard.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <csignal>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <string_view>
#include <utility>

#include "core/check.h"
#include "core/system_call.h"
#include "core/text.h"
#include "launcher/processes/pipe.h"
#include "launcher/program/rank_environment.h"

namespace ds::launcher {
namespace {

using Clock = std::chrono::steady_clock;
constexpr pid_t kFarewell = 0;
constexpr double kKillPatienceSeconds = 5;  // a process in an uninterruptible system call ends when that returns

std::string read_proc(pid_t pid, const char* name) {
  auto file = classic_stream<std::ifstream>(cat("/proc/", pid, "/", name), std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// 0 when the text begins with none.
pid_t leading_number(std::string_view text) {
  pid_t number = 0;
  std::from_chars(text.data(), text.data() + text.size(), number);
  return number;
}

std::vector<pid_t> all_processes() {
  std::vector<pid_t> pids;
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(opendir("/proc"), closedir);
  if (!folder) return pids;
  while (const dirent* entry = readdir(folder.get())) {
    if (const pid_t pid = leading_number(entry->d_name); pid > 0) pids.push_back(pid);
  }
  return pids;
}

// Parent of a process from /proc/PID/stat, "pid (name) state ppid ..."; 0 when it is gone or a zombie.
pid_t parent_of(pid_t pid) {
  const std::string stat = read_proc(pid, "stat");
  const size_t after_name = stat.rfind(')');
  if (after_name == std::string::npos || after_name + 4 >= stat.size() || stat[after_name + 2] == 'Z') return 0;
  return leading_number(std::string_view(stat).substr(after_name + 4));
}

void kill_marked(const std::string& launch_id) {
  for (int pass = 0; pass < 100; ++pass) {  // again while there are some: they may fork meanwhile
    bool found = false;
    for (pid_t pid : all_processes()) {
      if (pid == getpid() || !carries_launch_id(read_proc(pid, "environ"), launch_id)) continue;
      found |= kill(pid, SIGKILL) == 0;
    }
    if (!found) return;
    poll(nullptr, 0, 1);
  }
}

// The guard's whole life. It is forked from a process with one thread, so it may use any function.
[[noreturn]] void guard(int pipe, const std::string& launch_id) {
  prctl(PR_SET_NAME, "ds-launch-guard");
  setsid();
  const UniqueFd null(open("/dev/null", O_RDWR));       // open as long as the guard lives
  for (int fd = 0; fd < 3; ++fd) dup2(null.get(), fd);  // whoever reads our output must see its end with ds-launch
  std::vector<pid_t> groups;
  for (;;) {
    pid_t message = 0;
    const ssize_t got = read(pipe, &message, sizeof(message));
    if (got < 0 && errno == EINTR) continue;
    if (got != sizeof(message)) break;
    if (message == kFarewell) _exit(0);
    if (message > 0) groups.push_back(message);
    if (message < 0) std::erase(groups, -message);
  }
  for (pid_t group : groups) kill(-group, SIGKILL);
  kill_marked(launch_id);
  _exit(0);
}

void reap_all() {
  while (waitpid(-1, nullptr, WNOHANG) > 0) {
  }
}

}  // namespace

bool carries_launch_id(std::string_view environment, std::string_view id) {
  while (!environment.empty()) {
    const size_t end = std::min(environment.find('\0'), environment.size());
    std::string_view entry = environment.substr(0, end);
    environment.remove_prefix(std::min(end + 1, environment.size()));
    if (!entry.starts_with(kLaunchIdVariable) || entry.substr(kLaunchIdVariable.size(), 1) != "=") continue;
    for (entry.remove_prefix(kLaunchIdVariable.size() + 1); !entry.empty();) {
      const size_t comma = std::min(entry.find(','), entry.size());
      if (entry.substr(0, comma) == id) return true;
      entry.remove_prefix(std::min(comma + 1, entry.size()));
    }
  }
  return false;
}

std::string new_launch_id() { return cat(getpid(), '.', std::chrono::system_clock::now().time_since_epoch().count()); }

OrphanGuard::OrphanGuard(const std::string& launch_id) {
  require_system(prctl(PR_SET_CHILD_SUBREAPER, 1) == 0, "prctl(PR_SET_CHILD_SUBREAPER)");
  Pipe pipe = open_pipe();
  require_system(pipe.valid(), "starting the orphan guard: pipe");
  pipe_ = std::move(pipe.writer);
  guard_ = fork();
  require_system(guard_ >= 0, "starting the orphan guard: fork");
  if (guard_ == 0) {
    pipe_.reset();
    guard(pipe.reader.get(), launch_id);
  }
}

OrphanGuard::~OrphanGuard() {
  tell(kFarewell);
  pipe_.reset();
  waitpid(guard_, nullptr, 0);
}

void OrphanGuard::tell(pid_t message) const {
  // A guard that was killed by someone is no reason to end a training: the other nets hold. SIGPIPE is ignored.
  [[maybe_unused]] const ssize_t written = write(pipe_.get(), &message, sizeof(message));
}

void OrphanGuard::watch(pid_t group) { tell(group); }

void OrphanGuard::forget(pid_t group) { tell(-group); }

std::vector<pid_t> OrphanGuard::children() const {
  std::vector<pid_t> found;
  const pid_t self = getpid();
  // The file is there in kernels that are built with PROC_CHILDREN.
  if (auto file = classic_stream<std::ifstream>(cat("/proc/self/task/", self, "/children")); file) {
    for (pid_t pid; file >> pid;) found.push_back(pid);
    std::erase_if(found, [&](pid_t pid) { return parent_of(pid) != self; });  // zombies
  } else {
    for (pid_t pid : all_processes()) {
      if (parent_of(pid) == self) found.push_back(pid);
    }
  }
  std::erase(found, guard_);
  return found;
}

std::vector<std::string> OrphanGuard::sweep(const std::vector<pid_t>& groups, double grace_seconds) {
  std::vector<std::string> names;
  std::vector<pid_t> named;
  const Clock::time_point start = Clock::now();
  for (bool killing = false;;) {
    reap_all();
    const std::vector<pid_t> left = children();
    if (left.empty()) return names;
    for (pid_t pid : left) {
      if (std::find(named.begin(), named.end(), pid) != named.end()) continue;
      named.push_back(pid);
      std::string name = read_proc(pid, "comm");
      if (!name.empty()) name.pop_back();
      names.push_back(cat(name, " (", pid, ")"));
      if (!killing) kill(pid, SIGTERM);
    }
    const double waited = std::chrono::duration<double>(Clock::now() - start).count();
    killing = waited >= grace_seconds;
    if (killing) {
      for (pid_t group : groups) kill(-group, SIGKILL);
      for (pid_t pid : left) kill(pid, SIGKILL);
    }
    if (waited > grace_seconds + kKillPatienceSeconds) return names;
    poll(nullptr, 0, 2);
  }
}

}  // namespace ds::launcher
