// How often a job has started again, and how often it may.
#pragma once

#include <string>
#include <vector>

#include "launcher/command_line/notices.h"

namespace ds::launcher {

class Restarts {
 public:
  explicit Restarts(int most) : most_(most) {}

  // Counts one after a failure and says which it is; false when none is left.
  bool after_failure(Notices& notices);
  // One that does not count among them: the hosts of the job have changed.
  void with_other_hosts() { ++starts_; }

  int starts() const { return starts_; }  // after the first

  // Variables for the ranks: DS_RESTART_COUNT, and what torchrun calls TORCHELASTIC_RESTART_COUNT (failures only) and
  // TORCHELASTIC_MAX_RESTARTS.
  std::vector<std::string> entries() const;

 private:
  int most_;
  int failures_ = 0, starts_ = 0;
};

}  // namespace ds::launcher
