#include "zero/late_reductions.h"

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

comm::Work pending() { return comm::Work(std::make_shared<Pending>()); }

TEST(LateReductions, WithoutPatienceNothingIsLate) {
  LateReductions late(std::nullopt);
  late.begin_pass();
  EXPECT_TRUE(late.in_time(pending(), 0));
  EXPECT_EQ(late.passes(), 0);
}

TEST(LateReductions, OneThatIsReadyIsInTime) {
  LateReductions late(std::chrono::milliseconds(1));
  late.begin_pass();
  EXPECT_TRUE(late.in_time(comm::Work(), 0));
  EXPECT_EQ(late.passes(), 0);
}

TEST(LateReductions, APassCountsOnceAndWaitsNoMore) {
  LateReductions late(std::chrono::milliseconds(1));
  late.begin_pass();
  for (int bucket = 3; bucket > 0; --bucket) EXPECT_FALSE(late.in_time(pending(), static_cast<size_t>(bucket)));
  EXPECT_EQ(late.passes(), 1);
  EXPECT_TRUE(late.in_time(comm::Work(), 0)) << "what is ready is not late";
}

TEST(LateReductions, EachLatePassDoublesThePatienceUntilHooksDoNotWait) {
  constexpr std::chrono::milliseconds kPatience(2);
  LateReductions late(kPatience);
  for (int pass = 0; pass < LateReductions::kMostPasses; ++pass) {
    late.begin_pass();
    const auto begin = std::chrono::steady_clock::now();
    EXPECT_FALSE(late.in_time(pending(), 0));
    EXPECT_GE(std::chrono::steady_clock::now() - begin, kPatience * (1 << pass));
    EXPECT_EQ(late.passes(), pass + 1);
  }
  late.begin_pass();
  EXPECT_FALSE(late.in_time(pending(), 0));
  EXPECT_EQ(late.passes(), LateReductions::kMostPasses);
}

}  // namespace
}  // namespace ds::zero
