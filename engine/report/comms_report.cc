#include "engine/report/comms_report.h"

#include <exception>
#include <numeric>
#include <vector>

#include "comm/agreement.h"
#include "config/comms_operations.h"
#include "core/log.h"
#include "profiling/comms_table.h"

namespace ds::engine {
namespace {

profiling::LoggedOperations operations_of(const config::CommsLoggerSection& section) {
  profiling::LoggedOperations logged;
  logged.fill(section.prof_all);
  for (const std::string& name : section.prof_ops) {
    if (const auto kind = config::find_operation(name)) logged.at(static_cast<size_t>(*kind)) = true;
  }
  return logged;
}

// The records of each rank, by rank.
std::vector<std::vector<profiling::CommsRecord>> records_of_ranks(const std::vector<profiling::CommsRecord>& own,
                                                                  const Ranks& ranks) {
  const std::string text = profiling::to_bytes(own);
  std::vector<std::vector<profiling::CommsRecord>> all;
  for (int rank = 0; rank < ranks.world->size(); ++rank) {
    all.push_back(profiling::records_from_bytes(text_of_rank(text, rank, ranks.device, *ranks.world)));
  }
  return all;
}

}  // namespace

CommsReport::CommsReport(const config::CommsLoggerSection& section, comm::Communicator& world)
    : log_(std::make_shared<profiling::CommsLog>(
          profiling::CommsLogOptions{.rank = world.rank(),
                                     .operations = operations_of(section),
                                     .verbose = section.verbose && world.rank() == 0,
                                     .with_labels = section.debug})),
      is_first_rank_(world.rank() == 0) {
  before_training_.emplace(*log_);
  std::vector<int> all(static_cast<size_t>(world.size()));
  std::iota(all.begin(), all.end(), 0);
  world.observe_with(log_->observer_of(std::move(all)));
}

void CommsReport::observe_all_of(const Ranks& ranks) {
  const auto observe = [&](const std::shared_ptr<comm::Communicator>& group) {
    if (group->size() == 1 || log_->sees(group->name())) return;
    std::vector<int> members;
    for (const int64_t rank : comm::numbers_of_ranks(*group, ranks.device, {ranks.world->rank()}, "ranks of a group")) {
      members.push_back(static_cast<int>(rank));
    }
    group->observe_with(log_->observer_of(std::move(members)));
  };
  observe(ranks.part);
  if (ranks.sequence) observe(ranks.sequence);
  if (ranks.tensor) observe(ranks.tensor);
  if (ranks.mesh->size(comm::MeshAxis::kPipe) > 1) observe(ranks.mesh->group(comm::MeshAxis::kPipe));
}

std::string CommsReport::table(bool waits) {
  const std::vector<profiling::CommsRecord> records = log_->records(waits);
  asked_ = true;
  return records.empty() ? "communication: nothing was timed"
                         : cat("communication of this rank since initialize:", profiling::summary_table(records));
}

std::string CommsReport::summary(const Ranks& ranks, bool show_straggler) {
  std::string text = is_first_rank_ ? table(/*waits=*/true) : "";
  if (show_straggler) {
    const profiling::CommsLog::Pause pause(*log_);
    const auto all = records_of_ranks(log_->records(/*waits=*/true), ranks);
    if (is_first_rank_) {
      text += cat("\nwho waited for whom, in the latest ", profiling::CommsRecord::kKept,
                  " of each line:", profiling::straggler_table(profiling::compare_ranks(all)));
    }
  }
  asked_ = true;
  if (is_first_rank_) log::info(text);
  return text;
}

void CommsReport::end() noexcept {
  if (asked_ || !is_first_rank_) return;
  try {
    log::info(table(/*waits=*/false));
  } catch (const std::exception& error) {
    log::warning("comms_logger: ", error.what());
  }
}

}  // namespace ds::engine
