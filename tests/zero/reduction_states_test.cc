#include "zero/reduction/reduction_states.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <utility>
#include <vector>

#include "core/check.h"

namespace ds::zero {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

// Every pair that `allowed` does not have is an InternalError.
template <class State, class Event>
void expect_table(const std::vector<State>& states, const std::vector<Event>& events,
                  const std::map<std::pair<State, Event>, State>& allowed) {
  for (const State state : states) {
    for (const Event event : events) {
      const auto next = allowed.find({state, event});
      if (next == allowed.end()) {
        EXPECT_THROW(after(state, event), InternalError) << static_cast<int>(state) << ", " << static_cast<int>(event);
      } else {
        EXPECT_EQ(after(state, event), next->second) << static_cast<int>(state) << ", " << static_cast<int>(event);
      }
    }
  }
}

TEST(ReductionStates, OfABucket) {
  using enum BucketState;
  using enum BucketEvent;
  expect_table<BucketState, BucketEvent>({kEmpty, kCollecting, kInFlight, kReduced},
                                         {kCollect, kLaunch, kComplete, kSetAside, kDrop, kReopen},
                                         {{{kEmpty, kCollect}, kCollecting},
                                          {{kEmpty, kLaunch}, kInFlight},
                                          {{kEmpty, kDrop}, kEmpty},
                                          {{kCollecting, kCollect}, kCollecting},
                                          {{kCollecting, kLaunch}, kInFlight},
                                          {{kCollecting, kDrop}, kEmpty},
                                          {{kInFlight, kComplete}, kReduced},
                                          {{kReduced, kSetAside}, kEmpty},
                                          {{kReduced, kDrop}, kEmpty},
                                          {{kEmpty, kReopen}, kEmpty},
                                          {{kCollecting, kReopen}, kCollecting},
                                          {{kReduced, kReopen}, kCollecting}});
}

TEST(ReductionStates, OfAPass) {
  using enum PassState;
  using enum PassEvent;
  expect_table<PassState, PassEvent>({kIdle, kUnreduced, kLocal, kReducing, kFailed, kJoined},
                                     {kBeginLocal, kBeginReducing, kEnd, kFail, kFinish, kJoin, kReset},
                                     {{{kIdle, kBeginLocal}, kLocal},
                                      {{kIdle, kBeginReducing}, kReducing},
                                      {{kIdle, kFail}, kFailed},
                                      {{kIdle, kFinish}, kIdle},
                                      {{kIdle, kJoin}, kJoined},
                                      {{kIdle, kReset}, kIdle},
                                      {{kUnreduced, kBeginLocal}, kLocal},
                                      {{kUnreduced, kBeginReducing}, kReducing},
                                      {{kUnreduced, kFail}, kFailed},
                                      {{kUnreduced, kFinish}, kIdle},
                                      {{kUnreduced, kReset}, kIdle},
                                      {{kLocal, kEnd}, kUnreduced},
                                      {{kLocal, kFail}, kFailed},
                                      {{kReducing, kEnd}, kIdle},
                                      {{kReducing, kFail}, kFailed},
                                      {{kFailed, kFail}, kFailed},
                                      {{kFailed, kReset}, kIdle},
                                      {{kJoined, kFinish}, kJoined},
                                      {{kJoined, kReset}, kIdle}});
}

TEST(ReductionStates, AnErrorNamesStateAndEvent) {
  EXPECT_THAT([] { after(BucketState::kInFlight, BucketEvent::kSetAside); },
              ThrowsMessage<InternalError>(AllOf(HasSubstr("gradient bucket that is in flight gets no \"set aside\""),
                                                 HasSubstr("Life of a gradient bucket"))));
  EXPECT_THAT([] { after(PassState::kJoined, PassEvent::kBeginLocal); },
              ThrowsMessage<InternalError>(HasSubstr("backward pass that is joined gets no \"begin local\"")));
}

}  // namespace
}  // namespace ds::zero
