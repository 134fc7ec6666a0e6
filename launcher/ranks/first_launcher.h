// The first ds-launch of a job on many hosts, as the job on one of these hosts sees it: it gives orders and is told the
// first failure.
#pragma once

#include <string>
#include <vector>

#include "launcher/processes/deadline.h"

namespace ds::launcher {

struct JobOrder {
  enum class Kind {
    kSignal,   // handle it like a signal that came here
    kEnd,      // a rank of another host failed: end the ranks
    kKill,     // kill the ranks, for the reason `why`
    kRestart,  // ask the program to end after its next checkpoint, for hosts to be taken in
    kLost,     // no order: the first ds-launch is gone, or silent; comes once
  };
  Kind kind = Kind::kEnd;
  int signal = 0;
  std::string why;
};

class FirstLauncher {
 public:
  virtual ~FirstLauncher() = default;

  // To be called when all ranks of this host run.
  virtual void on_ranks_started() = 0;

  // The event to wait for: take_orders() has something to return when this descriptor (-1: none) is readable or that
  // time has come.
  struct Wait {
    int fd = -1;
    Deadline until;
  };
  virtual Wait next_orders() const = 0;
  // The orders that have come, without waiting.
  virtual std::vector<JobOrder> take_orders() = 0;

  // Reports that a rank of this host failed by itself. `exit_code`: that of the rank; `lines`: the text for the user.
  virtual void tell_failure(int exit_code, std::vector<std::string> lines) = 0;
};

}  // namespace ds::launcher
