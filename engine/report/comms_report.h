// The log of communication of an engine: the section comms_logger.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "dsengine/config.h"
#include "model/state/ranks.h"
#include "profiling/comms_log.h"

namespace ds::engine {

// The log of an engine, which has one. Observes the ranks' group, which may outlive it, and the groups made of it.
class CommsReport {
 public:
  CommsReport(const config::CommsLoggerSection& section, comm::Communicator& world);
  ~CommsReport() { log_->stop(); }
  CommsReport(const CommsReport&) = delete;
  CommsReport& operator=(const CommsReport&) = delete;

  // Begins to time operations: those of initialize are left out.
  void begin() { before_training_.reset(); }
  // Observes the groups that the program has made of a mesh before, too. Collective.
  void observe_all_of(const Ranks& ranks);

  profiling::CommsLog& log() const { return *log_; }
  // The summary on rank 0, which logs it; empty on others. `show_straggler`: collective over ranks.world.
  std::string summary(const Ranks& ranks, bool show_straggler);
  // Ends the report with the engine: rank 0 logs what has ended, unless it was asked for before. Throws nothing, waits
  // for nothing.
  void end() noexcept;

 private:
  std::string table(bool waits);

  std::shared_ptr<profiling::CommsLog> log_;
  std::optional<profiling::CommsLog::Pause> before_training_;
  const bool is_first_rank_;
  bool asked_ = false;
};

}  // namespace ds::engine
