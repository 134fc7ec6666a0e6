#include "launcher/processes/signal_policy.h"

#include <csignal>
#include <cstring>
#include <utility>

#include "core/text.h"

namespace ds::launcher {

SignalMeaning SignalPolicy::take(int number) {
  switch (number) {
    case SIGCHLD:
    case SIGWINCH:
      return SignalMeaning::kNone;
    case SIGTSTP:
      return SignalMeaning::kStop;
    case SIGUSR1:
    case SIGUSR2:
    case SIGSTOP:  // these two as the order of another ds-launch
    case SIGCONT:
      return SignalMeaning::kPassOn;
    default:
      break;
  }
  if (number == SIGINT && std::exchange(interrupted_, true)) return SignalMeaning::kKill;
  if (asked_to_end()) return SignalMeaning::kPassOn;
  ending_signal_ = number;
  return SignalMeaning::kEnd;
}

std::string passed_on_text(int number, std::string_view to, double grace_seconds) {
  const std::string time =
      grace_seconds > 0 ? cat("they have ", grace_seconds, " s to end") : std::string("waiting for them to end");
  return cat("SIG", sigabbrev_np(number), " passed on to ", to, "; ", time, ", a second SIGINT kills them");
}

}  // namespace ds::launcher
