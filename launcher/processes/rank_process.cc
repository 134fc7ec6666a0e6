#include "launcher/processes/rank_process.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <memory>

#include "core/system_call.h"
#include "launcher/command_line/core_list.h"
#include "launcher/processes/pipe.h"
#include "launcher/program/program_path.h"

namespace ds::launcher {
namespace {

// The report that the child sends through a close-on-exec pipe when it cannot become the program.
enum class Step : int { kStreams, kAffinity, kExec };
struct Failure {
  Step step;
  int error;
};

// All that the child needs, made before the fork: it may not allocate.
struct Prepared {
  const char* file;
  std::vector<char*> argv, envp;
  int streams[3];
  cpu_set_t* cpus;
  size_t cpus_bytes;
  bool hangup_ignored;
  pid_t parent;
  int report_fd;
};

std::vector<char*> pointers(const std::vector<std::string>& words) {
  std::vector<char*> result;
  for (const std::string& word : words) result.push_back(const_cast<char*>(word.c_str()));
  result.push_back(nullptr);
  return result;
}

[[noreturn]] void give_up(const Prepared& prepared, Step step) {
  const Failure failure{step, errno};
  if (write(prepared.report_fd, &failure, sizeof(failure)) != sizeof(failure)) _exit(125);
  _exit(126);
}

[[noreturn]] void become_program(const Prepared& prepared) {
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != prepared.parent) _exit(125);  // ds-launch died before the line above took effect
  for (int target = 0; target < 3; ++target) {
    if (dup2(prepared.streams[target], target) < 0) give_up(prepared, Step::kStreams);
  }
  if (prepared.cpus != nullptr && sched_setaffinity(0, prepared.cpus_bytes, prepared.cpus) != 0) {
    give_up(prepared, Step::kAffinity);
  }
  for (int number = 1; number < NSIG; ++number) {
    if (number != SIGHUP || !prepared.hangup_ignored) signal(number, SIG_DFL);
  }
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  execve(prepared.file, prepared.argv.data(), prepared.envp.data());
  give_up(prepared, Step::kExec);
}

// Waits until the child runs the program (the pipe closes) or says why it cannot.
void await_exec(pid_t pid, int report_fd, const RankCommand& command) {
  Failure failure{};
  ssize_t got;
  do {
    got = read(report_fd, &failure, sizeof(failure));
  } while (got < 0 && errno == EINTR);
  if (got != sizeof(failure)) return;
  waitpid(pid, nullptr, 0);
  if (failure.step == Step::kExec) throw exec_error(command.file, failure.error);
  throw UsageError(
      failure.step == Step::kAffinity
          ? cat("binding a rank to cores ", core_list_text(command.cpus), ": ", std::strerror(failure.error))
          : cat("connecting the streams of a rank: ", std::strerror(failure.error)));
}

}  // namespace

pid_t start_rank(const RankCommand& command) {
  Pipe report = open_pipe();
  require_system(report.valid(), "starting a rank: pipe");

  const int size = command.cpus.empty() ? 0 : *std::max_element(command.cpus.begin(), command.cpus.end()) + 1;
  std::unique_ptr<cpu_set_t, void (*)(cpu_set_t*)> cpus(size == 0 ? nullptr : CPU_ALLOC(size),
                                                        [](cpu_set_t* set) { CPU_FREE(set); });
  const size_t cpus_bytes = CPU_ALLOC_SIZE(size);
  if (cpus) CPU_ZERO_S(cpus_bytes, cpus.get());
  for (int cpu : command.cpus) CPU_SET_S(cpu, cpus_bytes, cpus.get());

  const Prepared prepared{.file = command.file.c_str(),
                          .argv = pointers(command.words),
                          .envp = pointers(command.environment),
                          .streams = {command.stdin_fd, command.stdout_fd, command.stderr_fd},
                          .cpus = cpus.get(),
                          .cpus_bytes = cpus_bytes,
                          .hangup_ignored = command.hangup_ignored,
                          .parent = getpid(),
                          .report_fd = report.writer.get()};
  const pid_t pid = fork();
  require_system(pid >= 0, "starting a rank: fork (the limits are ulimit -u and pids.max of the control group)");
  if (pid == 0) become_program(prepared);
  setpgid(pid, pid);  // here too: whoever runs first, the group exists
  report.writer.reset();
  await_exec(pid, report.reader.get(), command);
  return pid;
}

}  // namespace ds::launcher
