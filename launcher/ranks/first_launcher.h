// The first ds-launch of a job on many hosts, as the job on one of these hosts sees it: orders come from there, and the
// first failure is told there.
#pragma once

#include <string>
#include <vector>

#include "launcher/processes/deadline.h"

namespace ds::launcher {

struct JobOrder {
  enum class Kind {
    kSignal,   // as if the signal had come here
    kEnd,      // a rank of another host failed
    kKill,     // for the reason `why`
    kRestart,  // ask the program to end after its next checkpoint, for hosts to be taken in
    kLost,     // no order, but the end of all: the first ds-launch is gone, or silent; comes once
  };
  Kind kind = Kind::kEnd;
  int signal = 0;
  std::string why;
};

class FirstLauncher {
 public:
  virtual ~FirstLauncher() = default;

  // All ranks of this host run.
  virtual void on_ranks_started() = 0;

  // take_orders() has something to say when this descriptor (-1: none) is readable or that time has come.
  struct Wait {
    int fd = -1;
    Deadline until;
  };
  virtual Wait next_orders() const = 0;
  // Those that have come, without waiting.
  virtual std::vector<JobOrder> take_orders() = 0;

  // A rank of this host failed by itself. `exit_code`: of that rank; `lines`: what the user is to read.
  virtual void tell_failure(int exit_code, std::vector<std::string> lines) = 0;
};

}  // namespace ds::launcher
