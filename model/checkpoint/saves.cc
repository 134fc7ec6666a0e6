#include "model/checkpoint/saves.h"

#include <utility>

#include "checkpoint/tag_folder.h"
#include "comm/agreement.h"
#include "core/log.h"

namespace ds::engine {

int which_failed(const Ranks& ranks, const std::exception_ptr& failure) {
  try {
    return comm::failed_rank(failure, ranks.device, *ranks.world);
  } catch (...) {
    if (!failure) throw;  // of the collective
    return ranks.world->rank();
  }
}

void Saves::start(std::shared_ptr<checkpoint::SaveJob> job, checkpoint::BackgroundSave::Parts parts) {
  job_ = std::move(job);
  background_.start(std::move(parts));
}

std::string Saves::finish(const Ranks& ranks) {
  if (!job_) return {};
  std::exception_ptr failure = background_.wait_written();
  int failed = which_failed(ranks, failure);
  if (failed >= 0) job_->cancel();
  const std::exception_ptr publication = background_.wait_published();
  if (!failure) failure = publication;
  if (failed < 0) failed = which_failed(ranks, publication);
  const checkpoint::SaveTarget target = job_->target();
  job_.reset();
  if (failed < 0) return {};
  if (target.rank == 0) checkpoint::abandon_tag(target.save);
  return cat("checkpoint \"", target.save.tag, "\" was not written: ",
             failure ? comm::message_of(failure) : cat("rank ", failed, " failed, its message says why"));
}

void Saves::say_that_nothing_is_written(const Ranks& ranks) {
  if (std::exchange(said_that_nothing_is_written_, true) || ranks.world->rank() != 0) return;
  log::warning("save_checkpoint(): checkpoint.writer.type is MOCK: all of a save is done but its files, `latest` and ",
               "folders stay as they are, there is nothing to load, and the path that is returned is empty; use FAST ",
               "to keep checkpoints (said once)");
}

void Saves::end() noexcept {
  if (!job_) return;
  if (std::uncaught_exceptions() > 0) job_->hurry(kVisible);  // another rank may be gone
  const std::exception_ptr failure = background_.wait_published();
  const checkpoint::SaveTarget target = job_->target();
  job_.reset();
  if (!failure) return;
  log::error("checkpoint \"", target.save.tag, "\" was not written: ", comm::message_of(failure));
  if (target.rank == 0) checkpoint::abandon_tag(target.save);
}

}  // namespace ds::engine
