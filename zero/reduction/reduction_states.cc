#include "zero/reduction/reduction_states.h"

#include <array>
#include <cstddef>
#include <optional>

#include "core/check.h"
#include "core/text.h"

namespace ds::zero {
namespace {

template <class State, size_t kStates>
using Row = std::array<std::optional<State>, kStates>;

template <class State, class Event, size_t kStates, size_t kEvents>
State look_up(const std::array<Row<State, kStates>, kEvents>& table, const std::array<const char*, kStates>& states,
              const std::array<const char*, kEvents>& events, const char* what, State state, Event event) {
  const std::optional<State>& next = table.at(static_cast<size_t>(event)).at(static_cast<size_t>(state));
  if (!next) [[unlikely]] {
    ensure(false, cat("the rule that a ", what, " that is ", states[static_cast<size_t>(state)], " gets no \"",
                      events[static_cast<size_t>(event)], "\", Note [Life of a gradient bucket],")
                      .c_str());
  }
  return *next;
}

}  // namespace

BucketState after(BucketState state, BucketEvent event) {
  using enum BucketState;
  constexpr auto kNever = std::nullopt;
  static constexpr std::array<const char*, 4> kStates = {"empty", "collecting", "in flight", "reduced"};
  static constexpr std::array<const char*, 6> kEvents = {"collect",   "launch", "complete",
                                                         "set aside", "drop",   "reopen"};
  static constexpr std::array<Row<BucketState, 4>, 6> kTable = {{
      {kCollecting, kCollecting, kNever, kNever},
      {kInFlight, kInFlight, kNever, kNever},
      {kNever, kNever, kReduced, kNever},
      {kNever, kNever, kNever, kEmpty},
      {kEmpty, kEmpty, kNever, kEmpty},
      {kEmpty, kCollecting, kNever, kCollecting},
  }};
  return look_up(kTable, kStates, kEvents, "gradient bucket", state, event);
}

PassState after(PassState state, PassEvent event) {
  using enum PassState;
  constexpr auto kNever = std::nullopt;
  static constexpr std::array<const char*, 6> kStates = {"idle", "unreduced", "local", "reducing", "failed", "joined"};
  static constexpr std::array<const char*, 7> kEvents = {"begin local", "begin reducing", "end",  "fail",
                                                         "finish",      "join",           "reset"};
  static constexpr std::array<Row<PassState, 6>, 7> kTable = {{
      {kLocal, kLocal, kNever, kNever, kNever, kNever},
      {kReducing, kReducing, kNever, kNever, kNever, kNever},
      {kNever, kNever, kUnreduced, kIdle, kNever, kNever},
      {kFailed, kFailed, kFailed, kFailed, kFailed, kNever},
      {kIdle, kIdle, kNever, kNever, kNever, kJoined},
      {kJoined, kNever, kNever, kNever, kNever, kNever},
      {kIdle, kIdle, kNever, kNever, kIdle, kIdle},
  }};
  return look_up(kTable, kStates, kEvents, "backward pass", state, event);
}

}  // namespace ds::zero
