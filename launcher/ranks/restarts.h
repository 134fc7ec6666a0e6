// Counts how often a job has started again, and how often it may.
#pragma once

#include <string>
#include <vector>

#include "launcher/command_line/notices.h"

namespace ds::launcher {

class Restarts {
 public:
  explicit Restarts(int most) : most_(most) {}

  // Counts a restart after a failure and tells the user its number; false when none is left.
  bool after_failure(Notices& notices);
  // Counts a start because the hosts of the job have changed, which is no restart after a failure.
  void with_other_hosts() { ++starts_; }

  int starts() const { return starts_; }  // starts after the first one

  // Variables for the ranks: DS_RESTART_COUNT, and what torchrun calls TORCHELASTIC_RESTART_COUNT (failures only) and
  // TORCHELASTIC_MAX_RESTARTS.
  std::vector<std::string> entries() const;

 private:
  int most_;
  int failures_ = 0, starts_ = 0;
};

}  // namespace ds::launcher
