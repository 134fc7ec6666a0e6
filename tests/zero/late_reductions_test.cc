#include "zero/reduction/reduction_queue.h"

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <optional>

namespace ds::zero {
namespace {

class Pending final : public comm::WorkState {
 public:
  bool is_completed() override { return false; }
  void wait() override {}
};

const auto kLaunched = [] { return true; };

comm::Work pending() { return comm::Work(std::make_shared<Pending>()); }

TEST(LateReductions, WithoutPatienceNothingIsLate) {
  LateReductions late(std::nullopt);
  late.begin_pass();
  EXPECT_TRUE(late.in_time(pending(), 0, kLaunched));
  EXPECT_EQ(late.passes(), 0);
}

TEST(LateReductions, OneThatIsReadyIsInTime) {
  LateReductions late(std::chrono::milliseconds(1));
  late.begin_pass();
  EXPECT_TRUE(late.in_time(comm::Work(), 0, kLaunched));
  EXPECT_EQ(late.passes(), 0);
}

TEST(LateReductions, APassCountsOnceAndWaitsNoMore) {
  LateReductions late(std::chrono::milliseconds(1));
  late.begin_pass();
  for (int bucket = 3; bucket > 0; --bucket)
    EXPECT_FALSE(late.in_time(pending(), static_cast<size_t>(bucket), kLaunched));
  EXPECT_EQ(late.passes(), 1);
  EXPECT_TRUE(late.in_time(comm::Work(), 0, kLaunched)) << "what is ready is not late";
}

TEST(LateReductions, EachLatePassDoublesThePatienceUntilHooksDoNotWait) {
  constexpr std::chrono::milliseconds kPatience(2);
  LateReductions late(kPatience);
  for (int pass = 0; pass < LateReductions::kMostPasses; ++pass) {
    late.begin_pass();
    const auto begin = std::chrono::steady_clock::now();
    EXPECT_FALSE(late.in_time(pending(), 0, kLaunched));
    EXPECT_GE(std::chrono::steady_clock::now() - begin, kPatience * (1 << pass));
    EXPECT_EQ(late.passes(), pass + 1);
  }
  late.begin_pass();
  EXPECT_FALSE(late.in_time(pending(), 0, kLaunched));
  EXPECT_EQ(late.passes(), LateReductions::kMostPasses);
}

// The host is ahead of a device: until the device has come to the launch no time counts.
TEST(LateReductions, TimeCountsFromWhereTheDeviceHasComeTo) {
  constexpr std::chrono::milliseconds kPatience(5);
  constexpr int kQuestions = 200;  // of 50 microseconds and more: twice the patience
  LateReductions late(kPatience);
  late.begin_pass();
  int asked = 0;
  std::chrono::steady_clock::time_point reached;
  EXPECT_FALSE(late.in_time(pending(), 0, [&] {
    reached = std::chrono::steady_clock::now();
    return ++asked == kQuestions;
  }));
  EXPECT_EQ(asked, kQuestions) << "who has come to it is not asked again";
  EXPECT_GE(std::chrono::steady_clock::now() - reached, kPatience);
}

void be_late(LateReductions& late, int passes) {
  for (int pass = 0; pass < passes; ++pass) {
    late.begin_pass();
    EXPECT_FALSE(late.in_time(pending(), 0, kLaunched));
  }
}

void begin_passes(LateReductions& late, int64_t passes) {
  for (int64_t pass = 0; pass < passes; ++pass) late.begin_pass();
}

TEST(LateReductions, LatePassesAreForgotten) {
  LateReductions late(std::chrono::milliseconds(1));
  be_late(late, LateReductions::kMostPasses);
  begin_passes(late, LateReductions::kForgottenAfter - 1);
  EXPECT_EQ(late.passes(), LateReductions::kMostPasses);
  late.begin_pass();
  EXPECT_EQ(late.passes(), LateReductions::kMostPasses - 1) << "hooks wait again";
  be_late(late, 1);
  begin_passes(late, 2 * LateReductions::kForgottenAfter - 1);
  EXPECT_EQ(late.passes(), LateReductions::kMostPasses) << "later each time that it was too early";
  begin_passes(late, 1);
  EXPECT_EQ(late.passes(), LateReductions::kMostPasses - 1);
  begin_passes(late, LateReductions::kMostPasses * 2 * LateReductions::kForgottenAfter);
  EXPECT_EQ(late.passes(), 0);
}

}  // namespace
}  // namespace ds::zero
