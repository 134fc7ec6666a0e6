#include "comm/flight/stall_explanation.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "comm/flight/contract.h"
#include "comm/flight/rank_list.h"
#include "core/text.h"

namespace ds::comm {
namespace {

constexpr size_t kFramesInSentence = 4;
constexpr size_t kGuiltyInSentence = 3;
constexpr int64_t kShortestCircleNs = 200'000'000;

// "0.4", "31".
std::string seconds_text(double seconds) { return fixed(seconds, seconds < 10 ? 1 : 0); }

double seconds_since(const FlightLog& log, int64_t moment) {
  return static_cast<double>(log.header.now_ns - moment) * 1e-9 + log.silent_seconds;
}

// Says where a rank is on the axes of a mesh, by the groups of DeviceMesh that it is in: "; pipe 1, data 0, tensor 1".
// Empty where it is in the group of one axis alone, or of none.
std::string place_text(const FlightLog& log) {
  std::string text;
  int axes = 0;
  for (const auto& [name, axis] : {std::pair{"pipe", "pipe"}, std::pair{"data+expert", "data"},
                                   std::pair{"sequence", "sequence"}, std::pair{"tensor", "tensor"}}) {
    for (const FlightGroup& group : log.groups) {
      if (group.name.text() != name || group.own < 0 || parse_rank_list(group.ranks.text()).size() < 2) continue;
      text += cat(text.empty() ? "; " : ", ", axis, " ", group.own);
      ++axes;
      break;
    }
  }
  return axes > 1 ? text : "";
}

std::string who(const FlightLog& log) {
  return cat("rank ", log.header.rank, " (", log.header.host.text(), ", pid ", log.header.process, place_text(log),
             ")");
}

const FlightGroup& group_of(const FlightLog& log, const FlightEntry& entry) { return log.groups[entry.group]; }

// Finds a group in another rank's table; null where it is not there.
const FlightGroup* same_group(const FlightLog& log, const FlightGroup& group) {
  const auto found = std::find_if(log.groups.begin(), log.groups.end(), [&](const FlightGroup& other) {
    return other.name.bytes == group.name.bytes && other.ranks.bytes == group.ranks.bytes;
  });
  return found == log.groups.end() ? nullptr : &*found;
}

// The ranks that have not entered the operation that each rank waits in.
class WaitGraph {
 public:
  WaitGraph(const std::vector<FlightLog>& logs, int world_size) : world_size_(world_size) {
    for (const FlightLog& log : logs) logs_[log.header.rank] = &log;
    for (const auto& [rank, log] : logs_) {
      const FlightEntry* const entry = log->waiting();
      if (entry == nullptr || log->header.left != 0) continue;
      waiters_.push_back(rank);
      missing_[rank] = entry->message ? partner_missing(*log, *entry) : members_missing(*log, *entry);
    }
  }

  const FlightLog* log_of(int rank) const {
    const auto found = logs_.find(rank);
    return found == logs_.end() ? nullptr : found->second;
  }
  const std::vector<int>& waiters() const { return waiters_; }
  const std::vector<int>& missing(int waiter) const { return missing_.at(waiter); }
  bool waits(int rank) const { return missing_.contains(rank); }

  // Ranks that others wait for and that wait for nobody.
  std::vector<int> roots() const {
    std::set<int> roots;
    for (const auto& [waiter, missing] : missing_) {
      for (const int rank : missing) {
        if (!waits(rank)) roots.insert(rank);
      }
    }
    return {roots.begin(), roots.end()};
  }

  // Where every rank that is waited for waits itself: ranks of a circle, each waiting for the next. Else empty.
  std::vector<int> circle() const {
    for (const int start : waiters_) {
      std::vector<int> path{start};
      while (!missing_.at(path.back()).empty()) {
        const int next = missing_.at(path.back()).front();
        if (!waits(next)) break;
        const auto seen = std::find(path.begin(), path.end(), next);
        if (seen != path.end()) return {seen, path.end()};
        path.push_back(next);
      }
    }
    return {};
  }

 private:
  std::vector<int> members_missing(const FlightLog& log, const FlightEntry& entry) const {
    const FlightGroup& group = group_of(log, entry);
    if (group.own < 0) return {};
    std::vector<int> members = parse_rank_list(group.ranks.text());  // of a very long list the first part
    std::erase_if(members, [&](int rank) {
      if (rank < 0 || rank >= world_size_) return true;
      const FlightLog* const other = log_of(rank);
      const FlightGroup* const theirs = other == nullptr ? nullptr : same_group(*other, group);
      return theirs != nullptr && theirs->position >= entry.position;
    });
    return members;
  }

  // The other side of a message.
  std::vector<int> partner_missing(const FlightLog& log, const FlightEntry& entry) const {
    const FlightGroup& group = group_of(log, entry);
    const std::vector<int> members = parse_rank_list(group.ranks.text());
    if (entry.peer < 0 || static_cast<size_t>(entry.peer) >= members.size()) return {};
    const int partner = members[static_cast<size_t>(entry.peer)];
    const FlightLog* const other = log_of(partner);
    const FlightGroup* const theirs = other == nullptr ? nullptr : same_group(*other, group);
    if (theirs == nullptr) return {partner};
    const std::string opposite = entry.operation.text() == "send" ? "recv" : "send";
    for (const FlightEntry& candidate : other->entries) {
      if (candidate.message && &group_of(*other, candidate) == theirs && candidate.peer == group.own &&
          candidate.tag == entry.tag && candidate.position >= entry.position &&
          candidate.operation.text() == opposite) {
        return {};
      }
    }
    return {partner};
  }

  int world_size_;
  std::map<int, const FlightLog*> logs_;
  std::vector<int> waiters_;
  std::map<int, std::vector<int>> missing_;
};

// Returns the state of a rank's process as another rank of the host saw it.
std::optional<char> process_state(const std::vector<FlightLog>& logs, int rank) {
  for (const FlightLog& log : logs) {
    const auto found = log.neighbours.find(rank);
    if (found != log.neighbours.end()) return found->second;
  }
  return std::nullopt;
}

std::string phase_text(const FlightLog& log) {
  if (log.header.phase.size() == 0) return "";
  std::string text = cat(log.header.phase.text(), ", step ", log.header.step);
  if (log.header.micro_step >= 0) text += cat(", micro-batch ", log.header.micro_step);
  return text;
}

std::string last_text(const FlightLog& log) {
  const FlightEntry* const last = log.last();
  if (last == nullptr) return "it has issued no collective yet";
  const bool ended = last->ended_ns > 0;
  return cat("the last it entered is ", operation_text(*last, group_of(log, *last)), ", ",
             seconds_text(seconds_since(log, ended ? last->ended_ns : last->issued_ns)), " s ago",
             last->state == FlightState::kWaiting ? ", and waits in it" : "");
}

std::string silence_text(const FlightLog& log, std::optional<char> state) {
  const std::string silent = seconds_text(log.silent_seconds);
  switch (state.value_or('?')) {
    case 'T':
    case 't':
      return cat("it is stopped by a signal (SIGSTOP, or a debugger) for ", silent, " s; `kill -CONT ",
                 log.header.process, "` lets it go on");
    case 'D':
      return cat(
          "it gives no sign of life for ", silent,
          " s, in a wait of the kernel that no signal ends (state D: a disk, or a file system over the network)");
    case 'Z':
    case '-':
      return "its process is gone";
    case '?':
      return cat("it gives no sign of life for ", silent, " s: its host or its network may be gone");
    default:
      return cat("it gives no sign of life for ", silent, " s (process state ", *state, ")");
  }
}

std::string stack_text(const FlightLog& log) {
  if (log.stack.empty()) return "";
  std::string text = ", at ";
  for (size_t i = 0; i < std::min(kFramesInSentence, log.stack.size()); ++i) {
    text += cat(i == 0 ? "" : " < ", log.stack[i]);
  }
  return text;
}

bool is_dead(const FlightLog* log, double dead_after) {
  return log != nullptr && (log->header.left != 0 || log->silent_seconds > dead_after);
}

// Ranks that entered what they wait in, as far as anybody knows, and have fallen silent in it.
std::vector<int> silent_waiters(const WaitGraph& graph, double dead_after) {
  std::vector<int> silent = graph.waiters();
  std::erase_if(silent, [&](int rank) { return !is_dead(graph.log_of(rank), dead_after); });
  return silent;
}

std::string guilty_text(const std::vector<FlightLog>& logs, const WaitGraph& graph, int rank, double dead_after) {
  const FlightLog* const log = graph.log_of(rank);
  if (log == nullptr) return cat("nothing is known of rank ", rank, ", which has not begun");
  std::string text = who(*log) + " ";
  if (log->header.left != 0) return cat(text, "has ended in good order: ", last_text(*log));
  text += "has not entered it: ";
  if (is_dead(log, dead_after)) {
    text += silence_text(*log, process_state(logs, rank));
  } else {
    text += "it is alive";
    if (log->header.phase.size() > 0) {
      text += cat(", for ", seconds_text(seconds_since(*log, log->header.phase_ns)), " s in ", phase_text(*log));
    }
    text += stack_text(*log);
  }
  return cat(text, "; ", last_text(*log));
}

// "ranks 0-2 wait for 31 s in X", for the ranks that wait for this one directly, or all.
std::string waiters_text(const WaitGraph& graph, double seconds) {
  std::map<std::string, std::vector<int>> by_operation;
  for (const int rank : graph.waiters()) {
    const FlightLog& log = *graph.log_of(rank);
    const FlightEntry& entry = *log.waiting();
    by_operation[operation_text(entry, group_of(log, entry))].push_back(rank);
  }
  std::string text;
  size_t named = 0;
  for (const auto& [operation, ranks] : by_operation) {
    if (++named > kGuiltyInSentence) {
      text += cat(" and others elsewhere");
      break;
    }
    text +=
        cat(named == 1 ? "" : ", ", ranks_in_words(ranks), ranks.size() == 1 ? " waits" : " wait", " in ", operation);
  }
  return cat("stalled for ", seconds_text(seconds), " s: ", text);
}

std::string circle_text(const WaitGraph& graph, const std::vector<int>& circle) {
  std::map<std::string, std::vector<int>> phases;
  for (const int rank : circle) phases[graph.log_of(rank)->waiting()->phase.text()].push_back(rank);
  std::string text = phases_in_words(phases);
  for (size_t i = 0; i < circle.size(); ++i) {
    const FlightLog& log = *graph.log_of(circle[i]);
    const FlightEntry& entry = *log.waiting();
    text += cat(i == 0 ? "" : ", ", "rank ", circle[i], " waits in ", operation_text(entry, group_of(log, entry)),
                " for rank ", circle[(i + 1) % circle.size()]);
  }
  return text;
}

// Whether a rank that waits for its message to be taken may go on, because the other side waits for one of this rank:
// it puts aside what comes with another tag.
bool is_drained(const FlightLog& log, const FlightLog& other) {
  const FlightEntry& sent = *log.waiting();
  const FlightEntry& awaited = *other.waiting();
  const FlightGroup& group = group_of(log, sent);
  return sent.message && awaited.message && sent.operation.text() == "send" && awaited.operation.text() == "recv" &&
         awaited.peer == group.own && &group_of(other, awaited) == same_group(other, group);
}

}  // namespace

StallExplanation explain_stall(const std::vector<FlightLog>& logs, int world_size, double dead_after_seconds) {
  StallExplanation result;
  if (const std::string difference = first_difference(logs); !difference.empty()) {
    result.cause = StallCause::kDifference;
    result.sentence = cat("ranks issued different collectives: ", difference);
    for (const FlightLog& log : logs) {
      if (const FlightEntry* const entry = log.waiting()) {
        result.seconds = std::max(result.seconds, seconds_since(log, entry->waited_ns));
      }
    }
    return result;
  }
  const WaitGraph graph(logs, world_size);
  if (graph.waiters().empty()) return result;
  for (const int rank : graph.waiters()) {
    const FlightLog& log = *graph.log_of(rank);
    result.seconds = std::max(result.seconds, seconds_since(log, log.waiting()->waited_ns));
  }
  result.sentence = waiters_text(graph, result.seconds);
  result.guilty = graph.roots();
  if (!result.guilty.empty()) {
    const auto dead = [&](int rank) { return is_dead(graph.log_of(rank), dead_after_seconds); };
    std::stable_partition(result.guilty.begin(), result.guilty.end(), dead);
    result.cause = dead(result.guilty.front()) ? StallCause::kDead : StallCause::kLate;
    for (size_t i = 0; i < std::min(kGuiltyInSentence, result.guilty.size()); ++i) {
      result.sentence += cat("; ", guilty_text(logs, graph, result.guilty[i], dead_after_seconds));
    }
    if (result.guilty.size() > kGuiltyInSentence) {
      result.sentence += cat("; and ", result.guilty.size() - kGuiltyInSentence, " more ranks");
    }
    return result;
  }
  // Before a circle is told: what such a rank did last may not be known.
  result.guilty = silent_waiters(graph, dead_after_seconds);
  if (!result.guilty.empty()) {
    result.cause = StallCause::kDead;
    for (size_t i = 0; i < std::min(kGuiltyInSentence, result.guilty.size()); ++i) {
      const FlightLog& log = *graph.log_of(result.guilty[i]);
      result.sentence +=
          cat("; ", who(log), " is among them: ", silence_text(log, process_state(logs, result.guilty[i])));
    }
    if (result.guilty.size() > kGuiltyInSentence) {
      result.sentence += cat("; and ", result.guilty.size() - kGuiltyInSentence, " more ranks");
    }
    return result;
  }
  if (const std::vector<int> circle = graph.circle(); !circle.empty()) {
    result.cause = StallCause::kCircle;
    result.guilty = circle;
    result.sentence =
        cat("ranks wait for each other, for ", seconds_text(result.seconds), " s: ", circle_text(graph, circle));
    return result;
  }
  result.cause = StallCause::kTransport;
  result.sentence +=
      "; all ranks have entered it, and the data does not arrive: look at the network between their "
      "hosts, and at the devices";
  return result;
}

std::vector<WaitInCircle> find_circle(const std::vector<FlightLog>& logs, int world_size) {
  // First what costs little: where a rank runs, or all wait in one collective, there is no circle.
  const FlightLog* first = nullptr;
  bool apart = false;
  for (const FlightLog& log : logs) {
    if (log.header.left != 0) continue;
    const FlightEntry* const entry = log.waiting();
    if (entry == nullptr || log.header.now_ns - entry->waited_ns < kShortestCircleNs) return {};
    if (first == nullptr) first = &log;
    const FlightEntry& of_first = *first->waiting();
    apart = apart || entry->message || entry->position != of_first.position ||
            &group_of(log, *entry) != same_group(log, group_of(*first, of_first));
  }
  if (!apart) return {};
  const WaitGraph graph(logs, world_size);
  if (!graph.roots().empty()) return {};
  std::vector<WaitInCircle> found;
  const std::vector<int> circle = graph.circle();
  for (size_t i = 0; i < circle.size(); ++i) {
    const FlightLog& log = *graph.log_of(circle[i]);
    const FlightEntry& entry = *log.waiting();
    if (entry.thread == 0 || log.header.threads != 1) return {};
    if (is_drained(log, *graph.log_of(circle[(i + 1) % circle.size()]))) return {};
    found.push_back({.rank = circle[i], .operation = entry.sequence, .board_ns = log.header.now_ns});
  }
  return found;
}

std::string rank_report(const FlightLog& log, size_t entries) {
  std::string text = cat(who(log),
                         log.header.left != 0                       ? ", ended"
                         : log.neighbours.contains(log.header.rank) ? ", its process is gone"
                                                                    : "",
                         log.silent_seconds > 0 ? cat(", silent for ", seconds_text(log.silent_seconds), " s") : "");
  if (log.header.phase.size() > 0) text += cat(", in ", phase_text(log));
  text += "\n";
  for (const FlightGroup& group : log.groups) {
    text += cat("  group ", group.name.text(), " (ranks ", group.ranks.text(), "): ", group.position, " collectives\n");
  }
  for (size_t i = log.entries.size() - std::min(entries, log.entries.size()); i < log.entries.size(); ++i) {
    const FlightEntry& entry = log.entries[i];
    text += cat("  ", operation_text(entry, group_of(log, entry)), ": ", name_of(entry.state), ", issued ",
                seconds_text(seconds_since(log, entry.issued_ns)), " s ago");
    if (entry.ended_ns > 0) {
      text += cat(", took ", seconds_text(static_cast<double>(entry.ended_ns - entry.issued_ns) * 1e-9), " s");
    } else if (entry.waited_ns > 0) {
      text += cat(", waits for ", seconds_text(seconds_since(log, entry.waited_ns)), " s");
    }
    text += "\n";
  }
  for (size_t i = 0; i < log.stack.size(); ++i) text += cat(i == 0 ? "  stack: " : "         ", log.stack[i], "\n");
  return text;
}

}  // namespace ds::comm
