// The meaning of a signal to ds-launch for the processes it has started: ranks here, ranks on other hosts, or another
// launcher. One set of rules holds for all of them, see docs/launching.md. Pure: callers act on the meaning.
#pragma once

#include <string>
#include <string_view>

namespace ds::launcher {

enum class SignalMeaning {
  kNone,    // SIGCHLD, SIGWINCH: not about ending, stopping or going on
  kPassOn,  // SIGUSR1, SIGUSR2, SIGSTOP, SIGCONT, and what asks to end once more
  kStop,    // SIGTSTP: stop what was started and ds-launch itself; stop_together()
  kEnd,     // the first signal that asks to end (SIGINT, SIGTERM, SIGHUP, SIGQUIT): pass it on, a time to end begins
  kKill,    // SIGINT for the second time, and each one after it: no more time to end
};

class SignalPolicy {
 public:
  // The meaning of a signal that has come.
  SignalMeaning take(int number);

  bool asked_to_end() const { return ending_signal_ != 0; }
  int ending_signal() const { return ending_signal_; }  // the one that meant kEnd; 0: none yet

 private:
  int ending_signal_ = 0;
  bool interrupted_ = false;  // a SIGINT has come
};

// The message to the user at kEnd: "SIGTERM passed on to all ranks; they have 30 s to end, a second SIGINT kills them".
// `to`: the receivers; `grace_seconds`: 0 for no limit.
std::string passed_on_text(int number, std::string_view to, double grace_seconds);

}  // namespace ds::launcher
