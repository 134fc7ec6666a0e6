// Against DeepSpeed 0.19.8's CurriculumScheduler, whose values for steps from 1 on stand here.
#include "dsengine/difficulty_schedule.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "dsengine/errors.h"

namespace ds::efficiency {
namespace {

using testing::ElementsAre;
using Kind = DifficultySchedule::Kind;

std::vector<int64_t> first(const DifficultySchedule& schedule, int64_t steps) {
  std::vector<int64_t> result;
  for (int64_t step = 1; step <= steps; ++step) result.push_back(schedule.at(step));
  return result;
}

TEST(DifficultySchedule, GrowsLinearlyInMultiplesOfItsStep) {
  DifficultySchedule even{.min_difficulty = 8, .max_difficulty = 64, .total_curriculum_step = 10, .difficulty_step = 8};
  EXPECT_THAT(first(even, 12), ElementsAre(8, 16, 24, 24, 32, 40, 40, 48, 56, 64, 64, 64));
  DifficultySchedule odd{
      .min_difficulty = 10, .max_difficulty = 100, .total_curriculum_step = 7, .difficulty_step = 16};
  EXPECT_THAT(first(odd, 9), ElementsAre(16, 32, 48, 48, 64, 80, 96, 100, 100));
}

TEST(DifficultySchedule, GrowsWithARoot) {
  DifficultySchedule square{.kind = Kind::kFixedRoot,
                            .min_difficulty = 8,
                            .max_difficulty = 64,
                            .total_curriculum_step = 12,
                            .difficulty_step = 8,
                            .root_degree = 2};
  EXPECT_THAT(first(square, 14), ElementsAre(24, 24, 32, 40, 40, 40, 48, 48, 56, 56, 56, 64, 64, 64));
  DifficultySchedule cube{
      .kind = Kind::kFixedRoot, .max_difficulty = 1000, .total_curriculum_step = 9, .root_degree = 3};
  EXPECT_THAT(first(cube, 10), ElementsAre(481, 606, 693, 763, 822, 873, 919, 961, 1000, 1000));
}

TEST(DifficultySchedule, FollowsAListAndStaysAtItsMaximum) {
  DifficultySchedule reached{
      .kind = Kind::kFixedDiscrete, .max_difficulty = 7, .difficulty = {1, 3, 7, 5}, .max_step = {2, 4, 6}};
  EXPECT_THAT(first(reached, 9), ElementsAre(1, 1, 3, 3, 7, 7, 7, 7, 7));
  DifficultySchedule below{
      .kind = Kind::kFixedDiscrete, .max_difficulty = 9, .difficulty = {1, 4, 2}, .max_step = {2, 4}};
  EXPECT_THAT(first(below, 7), ElementsAre(1, 1, 4, 4, 2, 2, 2));
}

// 0.19.6 has no lower bound and gives 0 here; nor has random-LTD's in 0.19.8.
TEST(DifficultySchedule, IsNeverBelowItsFirstMultiple) {
  DifficultySchedule coarse{
      .min_difficulty = 8, .max_difficulty = 64, .total_curriculum_step = 100, .difficulty_step = 16};
  EXPECT_EQ(coarse.at(1), 16);
  EXPECT_EQ(coarse.at(0), 16);
  DifficultySchedule short_of_it{
      .min_difficulty = 5, .max_difficulty = 10, .total_curriculum_step = 3, .difficulty_step = 16};
  EXPECT_EQ(short_of_it.at(1), 10);
}

TEST(DifficultySchedule, LongAfterTheLastStepIsTheMaximum) {
  DifficultySchedule schedule{
      .min_difficulty = 8, .max_difficulty = 1 << 30, .total_curriculum_step = 1, .difficulty_step = 8};
  EXPECT_EQ(schedule.at(int64_t{1} << 62), 1 << 30);
}

TEST(DifficultySchedule, AFunctionOfTheProgram) {
  DifficultySchedule custom{.kind = Kind::kCustom};
  EXPECT_THROW(custom.at(1), UsageError);
  custom.custom = [](int64_t step) { return 2 * step; };
  EXPECT_THAT(first(custom, 3), ElementsAre(2, 4, 6));
}

}  // namespace
}  // namespace ds::efficiency
