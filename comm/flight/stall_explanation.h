// Why ranks wait for each other: from what each of them recorded to one sentence. Pure, torch-free.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "comm/flight/flight_log.h"

namespace ds::comm {

enum class StallCause : uint8_t {
  kNone,        // nobody waits
  kLate,        // a rank that lives has not come; it may yet
  kDead,        // a rank that has not come, or waits with the others, gives no sign of life, or has ended
  kCircle,      // ranks wait for each other
  kDifference,  // ranks issued different collectives
  kTransport,   // all have come, and still wait
};

struct StallExplanation {
  StallCause cause = StallCause::kNone;
  std::string sentence;     // the explanation for people; empty for kNone
  std::vector<int> guilty;  // ranks that the others wait for; empty where none stands out
  double seconds = 0;       // since when the first rank waits

  // Whether waiting longer cannot help.
  bool hopeless() const {
    return cause == StallCause::kDead || cause == StallCause::kCircle || cause == StallCause::kDifference;
  }
};

// `logs`: of all ranks of which anything is known, at most one a rank; `world_size` of them make the job. A rank whose
// heartbeat is older than `dead_after_seconds` counts as dead.
StallExplanation explain_stall(const std::vector<FlightLog>& logs, int world_size, double dead_after_seconds);

// A rank's place in a circle of ranks that wait for each other.
struct WaitInCircle {
  int rank = 0;
  uint64_t operation = 0;  // FlightEntry::sequence of what it waits in
  int64_t board_ns = 0;    // FlightHeader::now_ns of its log
};

// Finds ranks of which each waits for the next, and none can go on: its only thread that uses groups is held up in a
// collective or a message, for a moment already. Boards are enough. Empty where there are none, or a rank runs, which
// may let them go on.
std::vector<WaitInCircle> find_circle(const std::vector<FlightLog>& logs, int world_size);

// Describes in a few lines what a rank did last and does now, for a report of all ranks.
std::string rank_report(const FlightLog& log, size_t entries);

}  // namespace ds::comm
