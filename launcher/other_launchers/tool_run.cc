#include "launcher/other_launchers/tool_run.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <utility>

#include "core/check.h"
#include "core/secret/job_secret.h"
#include "core/system_call.h"
#include "launcher/command_line/host_list.h"
#include "launcher/command_line/pid_file.h"
#include "launcher/command_line/shell_words.h"
#include "launcher/other_launchers/tool_command.h"
#include "launcher/processes/deadline.h"
#include "launcher/processes/exit_cause.h"
#include "launcher/processes/handled_signals.h"
#include "launcher/processes/orphan_guard.h"
#include "launcher/processes/rank_process.h"
#include "launcher/processes/signal_policy.h"
#include "launcher/program/forwarded_environment.h"
#include "launcher/program/own_program.h"
#include "launcher/program/program_path.h"
#include "launcher/program/rank_environment.h"

namespace ds::launcher {
namespace {

constexpr double kLeftBehindSeconds = 1;  // from SIGTERM to SIGKILL for what the tool leaves behind
constexpr double kKillSeconds = 5;        // for the tool to kill the ranks of all hosts at the second SIGINT

// A file or a pipe is for rank 0; a terminal can have one process group only, and that is not the tool's.
UniqueFd input_of_tool() {
  const bool usable = fcntl(STDIN_FILENO, F_GETFD) >= 0 && !isatty(STDIN_FILENO);
  const UniqueFd null(usable ? -1 : open("/dev/null", O_RDONLY | O_CLOEXEC));
  return UniqueFd(fcntl(usable ? STDIN_FILENO : null.get(), F_DUPFD_CLOEXEC, 3));
}

class ToolRun {
 public:
  ToolRun(const std::string& launch_id, double signal_grace, Notices& notices)
      : guard_(launch_id),
        hangup_ignored_(is_hangup_ignored()),
        signals_(open_signals(hangup_ignored_)),
        signal_grace_(signal_grace),
        notices_(notices) {}

  void start(const std::string& file, const ToolCommand& command) {
    const UniqueFd in = input_of_tool();
    const UniqueFd out(fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, 3));
    const UniqueFd err(fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 3));
    require_system(in.valid() && out.valid() && err.valid(), "the streams of ", file);
    name_ = command.words.front();
    tool_ = start_rank({.file = file,
                        .words = command.words,
                        .environment = command.environment,
                        .stdin_fd = in.get(),
                        .stdout_fd = out.get(),
                        .stderr_fd = err.get(),
                        .cpus = {},
                        .hangup_ignored = hangup_ignored_});
    guard_.watch(tool_);
  }

  // The status of the tool, as wait4() gives it.
  int wait() {
    for (;;) {
      int status = 0;
      for (pid_t ended; (ended = waitpid(-1, &status, WNOHANG)) > 0;) {  // others are what ranks have left behind
        if (ended != tool_) continue;
        guard_.sweep({tool_}, kLeftBehindSeconds);
        return status;
      }
      wait_for_signal();
    }
  }

  int ending_signal() const { return signal_policy_.ending_signal(); }

 private:
  void wait_for_signal() {
    pollfd signals{.fd = signals_.get(), .events = POLLIN, .revents = 0};
    poll(&signals, 1, deadline_.poll_timeout_ms());
    while (const std::optional<int> number = next_signal(signals_)) handle(*number);
    if (!deadline_.passed()) return;
    notices_.warning(kill_asked_ ? "not ended after the second SIGINT" : cat("not ended within ", signal_grace_, " s"),
                     ": killing ", name_);
    kill(tool_, SIGKILL);
    deadline_ = {};
  }

  void handle(int number) {
    switch (signal_policy_.take(number)) {
      case SignalMeaning::kNone:
        return;
      case SignalMeaning::kStop:
        stop_together(SIGTSTP, [&](int sent) { kill(tool_, sent); });  // that signal, for it to stop the ranks too
        return;
      case SignalMeaning::kPassOn:
        kill(tool_, number);
        return;
      case SignalMeaning::kEnd:
        kill(tool_, number);
        if (signal_grace_ > 0) deadline_ = Deadline::in(signal_grace_);
        notices_.info(passed_on_text(number, cat(name_, " for all ranks"), signal_grace_));
        return;
      case SignalMeaning::kKill:
        return ask_to_kill(number);
    }
  }

  // The tool can kill the ranks of other hosts. A SIGKILL could not.
  void ask_to_kill(int number) {
    kill(tool_, number);
    if (std::exchange(kill_asked_, true)) {
      deadline_ = Deadline::in(0);
      return;
    }
    deadline_ = deadline_.or_sooner(Deadline::in(kKillSeconds));
    notices_.warning("second SIGINT passed on to ", name_, ", which has ", kKillSeconds,
                     " s to kill the ranks; a third one kills it");
  }

  OrphanGuard guard_;  // first: it wants no other descriptors
  bool hangup_ignored_;
  UniqueFd signals_;
  double signal_grace_;
  Notices& notices_;
  std::string name_;
  pid_t tool_ = 0;
  SignalPolicy signal_policy_;
  Deadline deadline_;  // to kill the tool
  bool kill_asked_ = false;
};

void say_what_is_unknown(const Options& options, const ToolCommand& command, Notices& notices) {
  if (options.launcher == Launcher::kPdsh || environment_value(command.environment, "OMP_NUM_THREADS")) return;
  notices.info("OMP_NUM_THREADS is not set: each rank takes the cores that ", command.words.front(), " leaves it");
}

struct ToolProgram {
  const char* what;
  std::vector<std::string> names;
  const char* install;
};

ToolProgram program_of(Launcher launcher) {
  switch (launcher) {
    case Launcher::kPdsh:
      return {"pdsh", {"pdsh"}, "Debian: pdsh"};
    case Launcher::kOpenMpi:
      return {"the mpirun of Open MPI", {"mpirun", "mpirun.openmpi"}, "Debian: openmpi-bin"};
    case Launcher::kMpich:
      return {"the mpirun of MPICH", {"mpirun", "mpirun.mpich", "mpiexec.hydra"}, "Debian: mpich"};
    case Launcher::kIntelMpi:
      return {"the mpirun of Intel MPI", {"mpirun", "mpiexec.hydra"}, "Intel oneAPI; source its vars.sh"};
    case Launcher::kSlurm:
      return {"srun of SLURM", {"srun"}, "Debian: slurm-client"};
    case Launcher::kSsh:
      break;
  }
  return {"ssh", {"ssh"}, "Debian: openssh-client"};
}

std::string version_text(const std::string& file) {
  // NOLINTNEXTLINE(bugprone-command-processor): the name is one word of the shell, whatever is in it
  const std::unique_ptr<FILE, int (*)(FILE*)> out(popen((shell_word(file) + " --version 2>&1").c_str(), "r"), pclose);
  std::array<char, 4096> bytes{};
  return out ? std::string(bytes.data(), fread(bytes.data(), 1, bytes.size(), out.get())) : "";
}

bool contains(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

}  // namespace

int run_with_tool(const Options& options, const std::vector<std::string>& environment, Notices& notices) {
  const std::string folder = std::filesystem::current_path().string();
  const std::string home = environment_value(environment, "HOME").value_or("/");
  // By their environment, which these tools hand on themselves; pdsh has command lines alone.
  const std::vector<std::string> secret = {cat(kJobSecretVariable, '=', new_job_secret())};
  const ToolSetting setting{.hosts = choose_tool_hosts(options, std::string(kDefaultHostfile)),
                            .folder = folder,
                            .ds_launch = find_own_program().path,
                            .environment = environment,
                            .forwarded = with_entries(forwarded_environment(environment, home, folder), secret)};
  ToolCommand command = tool_command(options, setting);
  const std::string file = find_tool(options.launcher, environment);
  const std::string launch_id = new_launch_id();
  command.environment =
      with_entries(command.environment, {cat(kLaunchIdVariable, '=', launch_ids(command.environment, launch_id))});
  const PidFile pid_file(options.save_pid ? pid_file_path() : "");
  say_what_is_unknown(options, command, notices);
  std::string line = file;
  for (size_t i = 1; i < command.words.size(); ++i) line += " " + command.words[i];
  notices.debug(line);

  ToolRun run(launch_id, options.signal_grace_seconds, notices);
  run.start(file, command);
  const int status = run.wait();
  if (run.ending_signal() != 0) return 128 + run.ending_signal();  // no tool tells whether all ranks ended well
  if (status != 0) notices.error(command.words.front(), " ended with ", exit_words(status));
  return exit_code_of(status);
}

bool is_version_of(Launcher launcher, const std::string& text) {
  switch (launcher) {
    case Launcher::kOpenMpi:
      return contains(text, "Open MPI") || contains(text, "OpenRTE");
    case Launcher::kMpich:
      return contains(text, "HYDRA");
    case Launcher::kIntelMpi:
      return contains(text, "Intel");
    default:
      return true;
  }
}

std::string find_tool(Launcher launcher, const std::vector<std::string>& environment) {
  const ToolProgram program = program_of(launcher);
  const std::string path = search_path(environment);
  const bool asks_version = program.names.size() > 1;
  std::string others;  // that are of another MPI
  for (const std::string& name : program.names) {
    try {
      const std::string file = find_program(name, path);
      if (!asks_version || is_version_of(launcher, version_text(file))) return file;
      others += cat(others.empty() ? "" : ", ", file);
    } catch (const ProgramError&) {  // the next name
    }
  }
  throw UsageError(cat("--launcher ", name_of(launcher), " needs ", program.what, ", which is not in PATH",
                       others.empty() ? "" : cat(" (", others, " is of another MPI)"), ": install it (",
                       program.install, ")"));
}

}  // namespace ds::launcher
