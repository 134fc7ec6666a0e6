#include "launcher/processes/handled_signals.h"

#include <sys/signalfd.h>
#include <unistd.h>

#include <csignal>

#include "core/system_call.h"

namespace ds::launcher {

bool is_hangup_ignored() {
  struct sigaction now {};
  return sigaction(SIGHUP, nullptr, &now) == 0 && now.sa_handler == SIG_IGN;
}

UniqueFd open_signals(bool hangup_ignored) {
  sigset_t set;
  sigemptyset(&set);
  for (int number : {SIGINT, SIGTERM, SIGQUIT, SIGUSR1, SIGUSR2, SIGWINCH, SIGTSTP, SIGCHLD}) sigaddset(&set, number);
  if (!hangup_ignored) sigaddset(&set, SIGHUP);
  sigprocmask(SIG_SETMASK, &set, nullptr);
  UniqueFd fd(signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
  require_system(fd.valid(), "signalfd");
  return fd;
}

std::optional<int> next_signal(const UniqueFd& signals) {
  signalfd_siginfo info{};
  if (read(signals.get(), &info, sizeof(info)) != sizeof(info)) return std::nullopt;
  return static_cast<int>(info.ssi_signo);
}

void stop_together(int stop_signal, const std::function<void(int number)>& send) {
  send(stop_signal);
  kill(getpid(), SIGSTOP);
  send(SIGCONT);  // here ds-launch goes on
}

}  // namespace ds::launcher
