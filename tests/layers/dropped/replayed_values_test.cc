// Decisions of a piece that is computed again are those of its first run, inside of other pieces too.
#include "core/replay/replayed_values.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "dsengine/errors.h"

namespace ds {
namespace {

int64_t counted = 0;
int64_t next() {
  return ReplayTape::replayed([] { return ++counted; });
}

TEST(ReplayTape, GivesTheFirstRunsValuesAgain) {
  counted = 0;
  EXPECT_EQ(next(), 1);
  ReplayTape tape;
  {
    const ReplayTape::Recording recording(tape);
    EXPECT_EQ(next(), 2);
    EXPECT_EQ(next(), 3);
  }
  EXPECT_EQ(next(), 4);
  for (int again = 0; again < 2; ++again) {
    const ReplayTape::Playing playing(tape);
    EXPECT_FALSE(ReplayTape::recording());
    EXPECT_EQ(next(), 2);
    EXPECT_FALSE(playing.finished());
    EXPECT_EQ(next(), 3);
    EXPECT_TRUE(playing.finished());
    EXPECT_THROW(next(), UsageError);
  }
  EXPECT_EQ(next(), 5);
}

// A region inside of one that is computed again has its first run anew, of the outer one's decisions.
TEST(ReplayTape, PiecesInsideOfPieces) {
  counted = 0;
  ReplayTape outer;
  ReplayTape inner;
  {
    const ReplayTape::Recording recording(outer);
    EXPECT_EQ(next(), 1);
    const ReplayTape::Recording inside(inner);
    EXPECT_EQ(next(), 2);
  }
  const ReplayTape::Playing playing(outer);
  EXPECT_EQ(next(), 1);
  ReplayTape inner_again;
  {
    const ReplayTape::Recording inside(inner_again);
    EXPECT_EQ(next(), 2);
  }
  const ReplayTape::Playing inside(inner_again);
  EXPECT_EQ(next(), 2);
  EXPECT_EQ(counted, 2);
}

}  // namespace
}  // namespace ds
