// The save that is in flight: an asynchronous one has a thread, and ends by a later call or with the engine.
#pragma once

#include <chrono>
#include <exception>
#include <memory>
#include <string>

#include "checkpoint/background_save.h"
#include "checkpoint/save_job.h"
#include "model/state/ranks.h"

namespace ds::engine {

// How long rank 0 waits for other ranks' parts once its own is written: beside training, and where ranks have met after
// writing. What was written before ranks met is visible to it after a moment, even over a network file system.
inline constexpr std::chrono::minutes kPatience(10);
inline constexpr std::chrono::seconds kVisible(60);

// Returns the number of a rank that failed, or -1; this rank's failure is not thrown. Collective.
int which_failed(const Ranks& ranks, const std::exception_ptr& failure);

// One save at a time. On the engine's thread.
class Saves {
 public:
  // The thread that reads the live state, which has to be waited for before that state changes.
  checkpoint::BackgroundSave& background() { return background_; }
  void start(std::shared_ptr<checkpoint::SaveJob> job, checkpoint::BackgroundSave::Parts parts);
  // Returns when no save is in flight, with the message of the last one's failure, if any. Collective.
  std::string finish(const Ranks& ranks);
  // Says once, in rank 0's log, that checkpoint.writer.type is "MOCK".
  void say_that_nothing_is_written(const Ranks& ranks);
  // Ends the save in flight with the engine: not collective, the message of a failure goes to the log.
  void end() noexcept;

 private:
  std::shared_ptr<checkpoint::SaveJob> job_;  // the last asynchronous save, until finish()
  checkpoint::BackgroundSave background_;
  bool said_that_nothing_is_written_ = false;
};

}  // namespace ds::engine
