#include "core/text.h"
#include "core/without_stack.h"
#include "dsengine/launch.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "comm/agreement.h"
#include "comm/meeting/rendezvous_address.h"
#include "core/check.h"
#include "core/restart_request.h"
#include "core/system_call.h"
#include "core/unique_fd.h"
#include "dsengine/engine.h"

extern char** environ;

namespace ds {
namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kCall = "DS_SPAWN_CALL";  // which call of the program a process is for
constexpr const char* kPipe = "DS_SPAWN_PIPE";  // where it says that it has come, and what it has thrown
constexpr char kCame = '!';                     // the first byte there
constexpr auto kGrace = std::chrono::seconds(5);
constexpr auto kBetweenLooks = std::chrono::milliseconds(10);

std::atomic<int> calls = 0;
std::atomic<bool> inside = false;  // a function that spawn() runs

void say(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t count = write(fd, text.data(), text.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return;
    text.remove_prefix(static_cast<size_t>(count));
  }
}

// The number in a variable that spawn() has set.
int number_in(const char* variable) {
  const char* const text = std::getenv(variable);
  return text == nullptr ? 0 : static_cast<int>(std::strtol(text, nullptr, 10));
}

// --- in a process that was started for the call

[[noreturn]] void run_here(const std::function<void(int)>& function) {
  const int fd = number_in(kPipe);
  const int rank = number_in("RANK");
  fcntl(fd, F_SETFD, FD_CLOEXEC);
  unsetenv(kCall);
  unsetenv(kPipe);
  inside = true;
  say(fd, {&kCame, 1});
  int code = EXIT_SUCCESS;
  try {
    function(rank);
  } catch (const std::exception& error) {
    say(fd, without_stack(error.what()));
    code = EXIT_FAILURE;
  }
  std::exit(code);
}

// --- in the process that calls

struct Child {
  pid_t pid = -1;
  UniqueFd pipe;     // the pipe that it writes its errors to
  std::string said;  // so far
  int status = 0;
  int looks = 0;  // until it had ended
  bool ended = false;
  bool lost = false;  // ended, and somebody else has taken the status; the pid may be another process by now

  void hear() {
    char bytes[4096];
    for (ssize_t count; (count = read(pipe.get(), bytes, sizeof(bytes))) > 0;)
      said.append(bytes, static_cast<size_t>(count));
  }
  bool failed() const { return ended && (lost || status != 0 || said.empty()); }
  // Whether a signal killed it that is no consequence: a rank that has lost its peers may abort, or die of a closed
  // pipe.
  bool killed() const {
    return ended && WIFSIGNALED(status) && WTERMSIG(status) != SIGABRT && WTERMSIG(status) != SIGPIPE;
  }
};

std::vector<std::string> own_arguments() {
  auto in = classic_stream<std::ifstream>("/proc/self/cmdline", std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  std::vector<std::string> words;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\0', begin), text.size());
    words.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  require_system(!words.empty(), "spawn: /proc/self/cmdline cannot be read, which has the program's arguments");
  return words;
}

int free_port() {
  const UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  auto* const where = reinterpret_cast<sockaddr*>(&address);
  require_system(bind(socket.get(), where, size) == 0 && getsockname(socket.get(), where, &size) == 0,
                 "spawn: expected a free port on 127.0.0.1, found none");
  return ntohs(address.sin_port);
}

int own_cores() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
}

class Environment {
 public:
  Environment() {
    for (char** entry = environ; *entry != nullptr; ++entry) entries_.emplace_back(*entry);
    // The variables of an outer launcher are not true of the processes that this one starts.
    for (const char* name :
         {"DS_JOINED_FILE", "DS_FLIGHT_JOB", "TORCHELASTIC_USE_AGENT_STORE", "CROSS_RANK", "CROSS_SIZE"})
      drop(name);
  }
  void set(const std::string& name, const std::string& value) {
    drop(name);
    entries_.push_back(cat(name, '=', value));
  }
  std::vector<char*> pointers() {
    std::vector<char*> result;
    for (std::string& entry : entries_) result.push_back(entry.data());
    result.push_back(nullptr);
    return result;
  }

 private:
  void drop(const std::string& name) {
    std::erase_if(entries_, [&](const std::string& entry) { return entry.starts_with(name + "="); });
  }
  std::vector<std::string> entries_;
};

// Runs between fork and exec: async-signal-safe calls alone.
[[noreturn]] void become_program(pid_t parent, int pipe, char* const* words, char* const* environment) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(127);  // it has ended meanwhile
  fcntl(pipe, F_SETFD, 0);
  execve("/proc/self/exe", words, environment);
  _exit(127);
}

Child start(int rank, Environment environment, std::vector<std::string>& words) {
  int ends[2];
  require_system(pipe2(ends, O_CLOEXEC) == 0, "spawn: no pipe for rank ", rank);
  Child child{.pipe = UniqueFd(ends[0])};
  UniqueFd writes(ends[1]);
  fcntl(child.pipe.get(), F_SETFL, O_NONBLOCK);
  environment.set("RANK", std::to_string(rank));
  environment.set("LOCAL_RANK", std::to_string(rank));
  environment.set(kPipe, std::to_string(writes.get()));
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  const std::vector<char*> entries = environment.pointers();
  const pid_t parent = getpid();
  child.pid = fork();
  if (child.pid == 0) become_program(parent, writes.get(), arguments.data(), entries.data());
  require_system(child.pid > 0, "spawn: rank ", rank, " cannot be started");
  return child;
}

// While SIGCHLD is ignored, which programs inherit, the kernel keeps no status of a child for waitpid().
class KeptStatuses {
 public:
  KeptStatuses() {
    require_system(sigaction(SIGCHLD, nullptr, &before_) == 0, "spawn: the meaning of SIGCHLD");
    const bool ignored = before_.sa_handler == SIG_IGN;
    changed_ = ignored || (before_.sa_flags & SA_NOCLDWAIT) != 0;
    if (!changed_) return;
    struct sigaction kept = before_;
    kept.sa_flags &= ~SA_NOCLDWAIT;
    if (ignored) kept.sa_handler = SIG_DFL;
    require_system(sigaction(SIGCHLD, &kept, nullptr) == 0, "spawn: the meaning of SIGCHLD");
  }
  KeptStatuses(const KeptStatuses&) = delete;
  KeptStatuses& operator=(const KeptStatuses&) = delete;
  ~KeptStatuses() {
    if (changed_) sigaction(SIGCHLD, &before_, nullptr);
  }

 private:
  struct sigaction before_ = {};
  bool changed_ = false;
};

// Takes note of those that have ended since the last look. Whether all have.
bool look(std::vector<Child>& children) {
  bool all = true;
  for (Child& child : children) {
    if (child.ended) continue;
    child.hear();
    ++child.looks;
    const pid_t found = waitpid(child.pid, &child.status, WNOHANG);
    child.lost = found < 0 && errno == ECHILD;
    child.ended = child.lost || found == child.pid;
    if (child.ended) child.hear();
    all = all && child.ended;
  }
  return all;
}

void end_all(std::vector<Child>& children) {
  for (const int signal : {SIGTERM, SIGKILL}) {
    look(children);  // no signal to a pid that is not a child any more
    for (const Child& child : children) {
      if (!child.ended) kill(child.pid, signal);
    }
    const auto limit = Clock::now() + kGrace;
    while (!look(children) && Clock::now() < limit) std::this_thread::sleep_for(kBetweenLooks);
  }
}

// Which rank is the cause, at least one having failed. The others fail for want of it, so that it is one that was
// killed, or was the first to end; one whose end nobody has seen comes last.
size_t rank_to_blame(const std::vector<Child>& children) {
  const auto order = [](const Child& child) {
    return std::tuple(!child.failed(), !child.killed(), child.lost, child.looks);
  };
  const auto first = std::min_element(children.begin(), children.end(),
                                      [&](const Child& one, const Child& other) { return order(one) < order(other); });
  return static_cast<size_t>(first - children.begin());
}

[[noreturn]] void explain(const Child& child, size_t rank, int call) {
  const std::string who = cat("spawn: rank ", rank, " (pid ", child.pid, ") ");
  const std::string thrown = child.said.size() > 1 ? cat(": ", child.said.substr(1)) : "";
  require<CommError>(!child.lost, who, "ended", thrown, thrown.empty() ? ", " : "; ",
                     "how is not known, because another part of the program has waited for it (waitpid() for any ",
                     "child, or a handler of SIGCHLD): while spawn() runs, it is to leave the ranks alone");
  require(!child.said.empty() || !WIFEXITED(child.status) || WEXITSTATUS(child.status) != 0, who,
          "ended without having come to call ", call + 1, " of spawn(): the way to it must not depend on anything but ",
          "arguments, environment and files");
  if (WIFSIGNALED(child.status)) {
    throw CommError(
        cat(who, "failed: killed by signal ", WTERMSIG(child.status), " (", strsignal(WTERMSIG(child.status)), ")"));
  }
  throw CommError(cat(who, "failed: exit code ", WEXITSTATUS(child.status), thrown));
}

// Returns when all have ended well.
void wait_for(std::vector<Child>& children, int call) {
  for (;;) {
    const bool all = look(children);
    const bool failed =
        std::any_of(children.begin(), children.end(), [](const Child& child) { return child.failed(); });
    if (all && !failed) return;
    std::this_thread::sleep_for(kBetweenLooks);
    if (!failed) continue;
    look(children);  // the cause may have ended after it was looked at, and another for want of it before that one was
    const size_t rank = rank_to_blame(children);
    end_all(children);
    explain(children[rank], rank, call);
  }
}

}  // namespace

void spawn(const std::function<void(int rank)>& function, int processes) {
  require(processes > 0, "spawn: expected at least one process, found ", processes);
  require(!inside, "spawn: expected a call by the program itself, found one inside of a function that spawn() runs");
  const int call = calls++;
  if (std::getenv(kCall) != nullptr) {
    if (call < number_in(kCall)) return;  // the processes of that call did it
    run_here(function);
  }
  std::fflush(nullptr);  // so that output that is not written yet is written once
  Environment environment;
  environment.set(kCall, std::to_string(call));
  environment.set("WORLD_SIZE", std::to_string(processes));
  environment.set("LOCAL_WORLD_SIZE", std::to_string(processes));
  environment.set("LOCAL_SIZE", std::to_string(processes));
  environment.set("MASTER_ADDR", "127.0.0.1");
  environment.set("MASTER_PORT", std::to_string(free_port()));
  environment.set("DS_FLIGHT_JOB", cat(getpid(), '.', Clock::now().time_since_epoch().count()));
  if (std::getenv("OMP_NUM_THREADS") == nullptr) {
    environment.set("OMP_NUM_THREADS", std::to_string(std::max(1, own_cores() / processes)));
  }
  std::vector<std::string> words = own_arguments();
  const KeptStatuses kept;
  std::vector<Child> children;
  try {
    for (int rank = 0; rank < processes; ++rank) children.push_back(start(rank, environment, words));
  } catch (...) {
    end_all(children);
    throw;
  }
  wait_for(children, call);
}

int launched_ranks() { return comm::parse_rendezvous("env://", comm::process_environment).world_size; }

}  // namespace ds

namespace ds::engine {

bool restart_wanted(Engine& engine) {
  const char* file = std::getenv(kRestartFileVariable);
  const bool seen = file != nullptr && access(file, F_OK) == 0;
  // The hosts hear of it one after the other.
  return largest_of_ranks(seen ? 1 : 0, engine.device(), engine.world(), "is a restart wanted") > 0;
}

}  // namespace ds::engine
