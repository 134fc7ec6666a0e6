// What a rank makes of its own record where rank 0 may judge no more.
#include <algorithm>

#include "comm/flight/flight_watch_state.h"
#include "comm/flight/rank_list.h"
#include "comm/meeting/process_state.h"
#include "core/log.h"

namespace ds::comm {

using namespace flight;

void FlightWatch::State::listen_to_first(const FlightLog& own) {
  const auto now = Clock::now();
  if (waiting_seconds(own) < limit() / 4 || !store->check({board_key(0)})) {
    first_heard = now;
    return;
  }
  const int64_t beat = log_from_bytes(to_text(store->get(board_key(0))), board_key(0)).header.now_ns;
  if (beat != first_beat) first_heard = now;
  first_beat = beat;
  first_silent = Seconds(now - first_heard).count() > dead_after() && !store->check({deaf_key(0)});
}

namespace {

// Whether a rank cannot go on without rank 0. Of a long list only the first ranks are known.
bool waits_for_first(const FlightEntry& entry, const FlightGroup& group) {
  const std::vector<int> members = parse_rank_list(group.ranks.text());
  if (!entry.message) return std::find(members.begin(), members.end(), 0) != members.end();
  return entry.peer >= 0 && static_cast<size_t>(entry.peer) < members.size() &&
         members[static_cast<size_t>(entry.peer)] == 0;
}

}  // namespace

// Without the store.
void FlightWatch::State::judge_alone() {
  if (was_stopped(last_look)) trusts_from = last_look + std::chrono::milliseconds(limit_ms.load());
  if (last_look < trusts_from) return;
  const int64_t asked = asked_ns;
  const double unanswered = asked == 0 ? 0 : Seconds(Clock::now().time_since_epoch() - Clock::duration(asked)).count();
  if (rank == 0 || deaf ||
      (!lost && !closed && !first_silent && unanswered < std::max(dead_after(), kShortestSilence / 2)))
    return;
  recorder->beat();
  const FlightLog own = recorder->log();
  const double waited = waiting_seconds(own);
  if (limit_ms == 0 || waited < limit()) return;
  const FlightEntry& entry = *own.waiting();
  if (closed && !waits_for_first(entry, own.groups[entry.group])) {
    if (!told) {
      log::warning("rank ", rank, " waits for ", fixed(waited, 1), " s in ",
                   operation_text(entry, own.groups[entry.group]),
                   "; rank 0 has ended in good order, so nobody says whom it waits for");
    }
    told = true;
    return;
  }
  const RankPlace& first = ranks[0];
  const char letter = near(0) ? state_of_process(first.process) : '?';
  const std::string state = letter == 'T'   ? cat(": it is stopped by a signal (SIGSTOP, or a "
                                                    "debugger); `kill -CONT ",
                                                  first.process, "` lets it go on")
                            : letter == '-' ? ": its process is gone"
                                            : "";
  const std::string text =
      cat("stalled for ", fixed(waited, 1), " s: rank ", rank, " waits in ",
          operation_text(entry, own.groups[entry.group]), "; rank 0 (", first.host_name, ", pid ", first.process, ") ",
          closed         ? "has ended in good order"
          : lost         ? "has closed the store of the rendezvous"
          : first_silent ? "gives no sign of life"
                         : cat("has not answered for ", fixed(unanswered, 1), " s"),
          state, folder.empty() ? "" : cat(". Records of this host: `ds-tool explain ", folder, "`"));
  bool speaks = true;  // one rank of each host, where all of them end
  for (int other = 1; other < rank && !closed; ++other) speaks = speaks && !near(other);
  if (speaks) log::error(text);
  end(text);
}

}  // namespace ds::comm
