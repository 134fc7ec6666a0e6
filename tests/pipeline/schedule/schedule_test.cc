#include "pipeline/schedule/schedule.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "core/check.h"
#include "pipeline/schedule/schedule_file.h"

namespace ds::pipeline {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using enum ScheduleKind;

std::string list_of(const Schedule& schedule, int rank) {
  std::string text;
  for (const Action& action : schedule.actions[rank]) text += (text.empty() ? "" : " ") + to_text(action);
  return text;
}

TEST(Action, TextAndBack) {
  for (const char* text :
       {"0F3", "12B0", "1I22", "3W4", "0SF3", "1RF3", "1SB0", "0RB0", "REDUCE_TIED", "REDUCE", "STEP"}) {
    EXPECT_EQ(to_text(parse_action(text)), text);
  }
  EXPECT_EQ(parse_action("12SB34"), (Action{ActionKind::kSendGradient, 12, 34}));
}

TEST(Action, OtherTextIsRefused) {
  for (const char* text :
       {"", "F", "0F", "F0", "0X1", "0F-1", "0F1 ", "0f1", "99999999999F0", "0F1F2", "STEPS", "0STEP1"}) {
    EXPECT_THAT([&] { parse_action(text); }, ThrowsMessage<ConfigError>(HasSubstr(cat("found \"", text, "\""))));
  }
}

TEST(ScheduleKind, NamesAndTorchNames) {
  for (const ScheduleKind kind : {kGPipe, k1F1B, kInterleaved, kZbH1, kZbH2, kZbV, kDualPipeV, kInference}) {
    EXPECT_EQ(parse_schedule_kind(name_of(kind)), kind);
  }
  EXPECT_EQ(parse_schedule_kind("GPipe"), kGPipe);
  EXPECT_EQ(parse_schedule_kind("ZB-H1"), kZbH1);
  EXPECT_EQ(parse_schedule_kind("Interleaved1F1B"), kInterleaved);
  EXPECT_EQ(parse_schedule_kind("ScheduleZBVZeroBubble"), kZbV);
  EXPECT_THAT([] { parse_schedule_kind("dualpipe"); },
              ThrowsMessage<ConfigError>(AllOf(HasSubstr("gpipe, 1f1b, interleaved"), HasSubstr("found \"dualpipe\""),
                                               HasSubstr("did you mean dualpipev?"))));
}

TEST(Schedule, StagesAreDealtInTurnsOrAsAV) {
  EXPECT_THAT(place_stages(kInterleaved, {.ranks = 2, .chunks = 3}), ElementsAre(0, 1, 0, 1, 0, 1));
  EXPECT_THAT(place_stages(kZbV, {.ranks = 3, .chunks = 2}), ElementsAre(0, 1, 2, 2, 1, 0));
  EXPECT_THAT(make_schedule(kDualPipeV, {.ranks = 3, .chunks = 2}).stages_of(1), ElementsAre(1, 4));
}

TEST(Schedule, OrdersOfFourMicroBatchesOnThreeRanks) {
  const ScheduleShape one{.ranks = 3, .chunks = 1, .micro_batches = 4};
  const ScheduleShape two{.ranks = 3, .chunks = 2, .micro_batches = 4};
  EXPECT_EQ(to_csv(make_schedule(kGPipe, one)),
            "0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3\n"
            "1F0,1F1,1F2,1F3,1B0,1B1,1B2,1B3\n"
            "2F0,2F1,2F2,2F3,2B0,2B1,2B2,2B3\n");
  EXPECT_EQ(to_csv(make_schedule(k1F1B, one)),
            "0F0,0F1,0F2,0B0,0F3,0B1,0B2,0B3\n"
            "1F0,1F1,1B0,1F2,1B1,1F3,1B2,1B3\n"
            "2F0,2B0,2F1,2B1,2F2,2B2,2F3,2B3\n");
  EXPECT_EQ(to_csv(make_schedule(kZbH1, one)),
            "0F0,0F1,0F2,0I0,0W0,0F3,0I1,0W1,0I2,0W2,0I3,0W3\n"
            "1F0,1F1,1I0,1F2,1I1,1W0,1F3,1I2,1W1,1I3,1W2,1W3\n"
            "2F0,2I0,2F1,2I1,2F2,2I2,2W0,2F3,2I3,2W1,2W2,2W3\n");
  EXPECT_EQ(to_csv(make_schedule(kZbH2, one)),
            "0F0,0F1,0F2,0F3,0I0,0W0,0I1,0W1,0I2,0W2,0I3,0W3\n"
            "1F0,1F1,1F2,1I0,1F3,1I1,1I2,1W0,1I3,1W1,1W2,1W3\n"
            "2F0,2I0,2F1,2I1,2F2,2I2,2F3,2I3,2W0,2W1,2W2,2W3\n");
  EXPECT_EQ(to_csv(make_schedule(kInference, two)),
            "0F0,0F1,0F2,0F3,3F0,3F1,3F2,3F3\n"
            "1F0,1F1,1F2,1F3,4F0,4F1,4F2,4F3\n"
            "2F0,2F1,2F2,2F3,5F0,5F1,5F2,5F3\n");
  EXPECT_EQ(make_schedule(kInterleaved, one).actions, make_schedule(k1F1B, one).actions);
}

TEST(Schedule, ReceivesStartOneActionAhead) {
  const Schedule schedule = make_schedule(k1F1B, {.ranks = 2, .chunks = 1, .micro_batches = 2});
  EXPECT_EQ(list_of(schedule, 0), "0F0 0SF0 0RB0 0F1 0SF1 0RB1 0B0 0B1 REDUCE REDUCE_TIED STEP");
  EXPECT_EQ(list_of(schedule, 1), "1RF0 1F0 1RF1 1B0 1SB0 1F1 1B1 1SB1 REDUCE REDUCE_TIED STEP");
}

// Rank 0 sends the gradient 3SB0 before the activation 0SF1; rank 1, which needs them in the other order, starts to
// receive both for 1F1.
TEST(Schedule, ReceivesFromARankStartInTheOrderOfItsSends) {
  const Schedule schedule = parse_schedule(
      "0F0,3F0,3B0,0F1,3F1,3B1,0B0,0B1\n"
      "1F0,2F0,1F1,2F1,2B0,2B1,1B0,1B1\n",
      "mine");
  EXPECT_EQ(list_of(schedule, 1),
            "1RF0 1F0 2RB0 1RF1 2F0 2SF0 1F1 2F1 2SF1 2RB1 2B0 2B1 1B0 1SB0 1B1 1SB1 REDUCE REDUCE_TIED STEP");
}

TEST(Schedule, OneRankSendsNothing) {
  EXPECT_EQ(list_of(make_schedule(kZbV, {.ranks = 1, .chunks = 2, .micro_batches = 1}), 0),
            "0F0 1F0 1I0 1W0 0I0 0W0 REDUCE REDUCE_TIED STEP");
}

TEST(Schedule, InferenceHasNoStep) {
  const Schedule schedule = make_schedule(kInference, {.ranks = 2, .chunks = 1, .micro_batches = 2});
  EXPECT_FALSE(schedule.training);
  EXPECT_EQ(list_of(schedule, 0), "0F0 0SF0 0F1 0SF1");
  EXPECT_EQ(list_of(schedule, 1), "1RF0 1RF1 1F0 1F1");
}

// What does not fill whole groups makes groups larger: two of 4 and one of 3 here, not three of 3 and one of 2.
TEST(Schedule, InterleavedGroupsShareWhatIsLeftOver) {
  const Schedule schedule = make_schedule(kInterleaved, {.ranks = 3, .chunks = 2, .micro_batches = 11});
  EXPECT_EQ(to_csv(schedule).substr(0, 63), "0F0,0F1,0F2,0F3,3F0,3F1,3F2,3F3,0F4,3B0,0F5,3B1,0F6,3B2,0F7,3B3");
}

TEST(Schedule, NumbersThatAKindDoesNotHaveAreRefused) {
  EXPECT_THAT([] { make_schedule(k1F1B, {.ranks = 2, .chunks = 2, .micro_batches = 4}); },
              ThrowsMessage<ConfigError>(
                  AllOf(HasSubstr("schedule 1f1b: expected 1 chunk a rank, found 2"), HasSubstr("use interleaved"))));
  EXPECT_THAT([] { make_schedule(kZbV, {.ranks = 2, .chunks = 1, .micro_batches = 4}); },
              ThrowsMessage<ConfigError>(
                  AllOf(HasSubstr("schedule zbv: expected 2 chunks a rank, found 1"), HasSubstr("set chunks to 2"))));
  EXPECT_THAT([] { make_schedule(kGPipe, {.ranks = 0}); }, ThrowsMessage<ConfigError>(HasSubstr("ranks, found 0")));
  EXPECT_THAT([] { make_schedule(kInterleaved, {.chunks = -1}); },
              ThrowsMessage<ConfigError>(HasSubstr("chunks, found -1")));
  EXPECT_THAT([] { make_schedule(kGPipe, {.micro_batches = 0}); },
              ThrowsMessage<ConfigError>(HasSubstr("micro-batches, found 0")));
  EXPECT_THAT([] { make_schedule(kGPipe, {.ranks = 1 << 20, .micro_batches = 1 << 20}); },
              ThrowsMessage<ConfigError>(HasSubstr("forwards, found 1048576 ranks")));
}

TEST(Schedule, MessagesNeedActionsOfTheirRank) {
  const ScheduleShape shape{.ranks = 2};
  const Action forward{ActionKind::kForward, 0, 0};
  EXPECT_THAT(
      [&] {
        with_messages("mine", shape, {0, 1}, {{}, {forward}});
      },
      ThrowsMessage<ConfigError>(AllOf(HasSubstr("rank 1"), HasSubstr("found 0F0"))));
  EXPECT_THROW(with_messages("mine", shape, {0, 1}, {{forward}}), ConfigError);
  EXPECT_THROW(with_messages("mine", shape, {0}, {{forward}, {}}), ConfigError);
  EXPECT_THROW(with_messages("mine", shape, {0, 1}, {{{ActionKind::kForward, 0, 1}}, {}}), ConfigError);
  EXPECT_THROW(with_messages("mine", shape, {0, 1}, {{{ActionKind::kStep, 0, 0}}, {}}), ConfigError);
}

}  // namespace
}  // namespace ds::pipeline
