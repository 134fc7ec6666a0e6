#include "launcher/ranks/restarts.h"

namespace ds::launcher {

bool Restarts::after_failure(Notices& notices) {
  if (failures_ == most_) {
    if (most_ > 0) notices.error("no restart is left of ", most_, " (--max_restarts)");
    return false;
  }
  ++failures_;
  ++starts_;
  notices.warning("starting all ranks again: restart ", failures_, " of ", most_);
  return true;
}

std::vector<std::string> Restarts::entries() const {
  return {cat("DS_RESTART_COUNT=", starts_), cat("TORCHELASTIC_RESTART_COUNT=", failures_),
          cat("TORCHELASTIC_MAX_RESTARTS=", most_)};
}

}  // namespace ds::launcher
