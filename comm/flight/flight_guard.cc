// A rank judges its own record where rank 0 may judge no more.
#include <unistd.h>

#include <algorithm>

#include "comm/flight/flight_watch_state.h"
#include "comm/flight/rank_list.h"
#include "comm/meeting/process_state.h"
#include "core/log.h"

namespace ds::comm {

using namespace flight;

namespace {

// Whether a rank cannot go on without rank 0. Of a long list only the first ranks are known.
bool waits_for_first(const FlightEntry& entry, const FlightGroup& group) {
  const std::vector<int> members = parse_rank_list(group.ranks.text());
  if (!entry.message) return std::find(members.begin(), members.end(), 0) != members.end();
  return entry.peer >= 0 && static_cast<size_t>(entry.peer) < members.size() &&
         members[static_cast<size_t>(entry.peer)] == 0;
}

}  // namespace

void FlightWatch::Guard::run() {
  while (state_.pause(state_.interval() / 2)) {
    try {
      if (!state_.ending) judge_alone();
    } catch (const std::exception& error) {
      log::warning("flight watch: ", error.what());
    }
    if (!state_.ending) continue;
    const auto more =
        state_.rank == 0 ? state_.interval() : std::chrono::milliseconds(0);  // others read the verdict in its store
    if (!state_.pause(kGrace + more)) return;
    if (!state_.end_process) {
      log::error("this rank does not end by itself, and is left as it is: flight_recorder.end_process is false");
      return;
    }
    log::error("this rank does not end by itself, so it is ended, with exit code ", kExitCode);
    _exit(kExitCode);
  }
}

// Judges without the store.
void FlightWatch::Guard::judge_alone() {
  if (state_.was_stopped(last_look_)) trusts_from_ = last_look_ + std::chrono::milliseconds(state_.limit_ms.load());
  if (last_look_ < trusts_from_) return;
  const int64_t asked = state_.asked_ns;
  const double unanswered = asked == 0 ? 0 : Seconds(Clock::now().time_since_epoch() - Clock::duration(asked)).count();
  if (state_.rank == 0 || state_.deaf ||
      (!state_.lost && !state_.closed && !state_.first_silent &&
       unanswered < std::max(state_.dead_after(), kShortestSilence / 2)))
    return;
  state_.recorder->beat();
  const FlightLog own = state_.recorder->log();
  const double waited = waiting_seconds(own);
  if (state_.limit_ms == 0 || waited < state_.limit()) return;
  const FlightEntry& entry = *own.waiting();
  if (state_.closed && !waits_for_first(entry, own.groups[entry.group])) {
    if (!told_) {
      log::warning("rank ", state_.rank, " waits for ", fixed(waited, 1), " s in ",
                   operation_text(entry, own.groups[entry.group]),
                   "; rank 0 has ended in good order, so nobody says whom it waits for");
    }
    told_ = true;
    return;
  }
  const RankPlace& first = state_.ranks[0];
  const char letter = state_.near(0) ? state_of_process(first.process) : '?';
  const std::string state = letter == 'T'   ? cat(": it is stopped by a signal (SIGSTOP, or a "
                                                    "debugger); `kill -CONT ",
                                                  first.process, "` lets it go on")
                            : letter == '-' ? ": its process is gone"
                                            : "";
  const std::string text =
      cat("stalled for ", fixed(waited, 1), " s: rank ", state_.rank, " waits in ",
          operation_text(entry, own.groups[entry.group]), "; rank 0 (", first.host_name, ", pid ", first.process, ") ",
          state_.closed         ? "has ended in good order"
          : state_.lost         ? "has closed the store of the rendezvous"
          : state_.first_silent ? "gives no sign of life"
                                : cat("has not answered for ", fixed(unanswered, 1), " s"),
          state, state_.folder.empty() ? "" : cat(". Records of this host: `ds-tool explain ", state_.folder, "`"));
  bool speaks = true;  // one rank of each host, where all of them end
  for (int other = 1; other < state_.rank && !state_.closed; ++other) speaks = speaks && !state_.near(other);
  if (speaks) log::error(text);
  state_.end(text);
}

}  // namespace ds::comm
