// Schedules of difficulties in a ds_config: what they give, and what is wrong with them, by name.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "tests/config/parse_text.h"

namespace ds::engine::config {
namespace {

using testing::AllOf;
using testing::HasSubstr;

std::string curriculum(const std::string& rest) { return "{curriculum_learning: {enabled: true, " + rest + "}}"; }

TEST(DifficultyChecks, SchedulesAreThoseOfTheFile) {
  const DsConfig linear =
      parse_text(curriculum("min_difficulty: 8, max_difficulty: 64, schedule_type: 'fixed_linear', schedule_config: "
                            "{total_curriculum_step: 10, difficulty_step: 8}"));
  EXPECT_EQ(linear.curriculum_learning.schedule.at(1), 8);
  EXPECT_EQ(linear.curriculum_learning.schedule.at(5), 32);
  EXPECT_EQ(linear.curriculum_learning.schedule.at(10), 64);
  const DsConfig root =
      parse_text(curriculum("min_difficulty: 8, max_difficulty: 64, schedule_type: 'fixed_root', schedule_config: "
                            "{total_curriculum_step: 12, difficulty_step: 8, root_degree: 2}"));
  EXPECT_EQ(root.curriculum_learning.schedule.at(1), 24);
  const DsConfig listed =
      parse_text(curriculum("min_difficulty: 1, max_difficulty: 3, schedule_type: 'fixed_discrete', schedule_config: "
                            "{difficulty: [1, 2, 3], max_step: [5, 10]}"));
  EXPECT_EQ(listed.curriculum_learning.schedule.at(5), 1);
  EXPECT_EQ(listed.curriculum_learning.schedule.at(11), 3);
}

TEST(DifficultyChecks, WhatIsMissingOrWrongIsNamed) {
  EXPECT_THAT(refusal_of(curriculum("schedule_type: 'fixed_linear'")),
              AllOf(HasSubstr("curriculum_learning.min_difficulty: expected an integer > 0, found none"),
                    HasSubstr("curriculum_learning.schedule_config: expected total_curriculum_step"),
                    HasSubstr("expected difficulty_step")));
  EXPECT_THAT(refusal_of(curriculum("min_difficulty: 9, max_difficulty: 8, schedule_type: 'custom'")),
              HasSubstr("curriculum_learning.max_difficulty: expected an integer that is at least min_difficulty (9)"));
  EXPECT_THAT(refusal_of(curriculum("min_difficulty: 1, max_difficulty: 8")),
              HasSubstr("curriculum_learning.schedule_type: expected fixed_linear, fixed_root"));
  EXPECT_THAT(refusal_of(curriculum("min_difficulty: 1, max_difficulty: 8, schedule_type: 'fixed_discrete', "
                                    "schedule_config: {difficulty: [1, 2], max_step: [5, 10]}")),
              HasSubstr("expected one more difficulty than max_step"));
  EXPECT_THAT(refusal_of(curriculum("min_difficulty: 1, max_difficulty: 8, schedule_type: 'fixed_discrete', "
                                    "schedule_config: {difficulty: [1, 2, 3], max_step: [10, 5]}")),
              HasSubstr("expected a max_step that grows, found 10 before 5"));
  EXPECT_THAT(refusal_of(curriculum("min_difficulty: 1, max_difficulty: 9223372036854775807, schedule_type: 'custom'")),
              HasSubstr("at most 2^40"));
  EXPECT_THAT(
      refusal_of(curriculum("min_difficulty: 8, max_difficulty: 64, schedule_type: 'fixed_root', schedule_config: "
                            "{total_curriculum_step: 12, difficulty_step: 8, root_degree: 1e-9}")),
      HasSubstr("expected root_degree, a number from 0.01 on, found 1e-09"));
  EXPECT_THAT(refusal_of("{progressive_layer_drop: {enabled: true, theta: 0}}"),
              HasSubstr("progressive_layer_drop.theta: expected a probability in (0, 1], found 0"));
}

TEST(DifficultyChecks, SectionsThatAreOffMayBeIncomplete) {
  EXPECT_FALSE(
      parse_text("{curriculum_learning: {enabled: false, schedule_type: 'fixed_linear'}}").curriculum_learning.enabled);
}

TEST(DifficultyChecks, TokensThatALayerKeeps) {
  const auto text = [](const std::string& ids, const std::string& schedule) {
    return "{data_efficiency: {enabled: true, data_routing: {enabled: true, random_ltd: {enabled: true, "
           "random_ltd_layer_num: 2, random_ltd_layer_id: " +
           ids + ", random_ltd_schedule: " + schedule + "}}}}";
  };
  const std::string schedule =
      "{min_value: 16, max_value: 128, schedule_type: 'fixed_linear', schedule_config: {require_steps: 10, "
      "seq_per_step: 16}}";
  const DsConfig config = parse_text(text("[1, 2]", schedule));
  EXPECT_TRUE(config.data_efficiency.drops_tokens());
  EXPECT_EQ(config.data_efficiency.data_routing.random_ltd.kept.at(0), 16);
  EXPECT_EQ(config.data_efficiency.data_routing.random_ltd.kept.at(10), 128);
  EXPECT_THAT(refusal_of(text("[1]", schedule)), HasSubstr("expected as many layers as random_ltd_layer_num says, 2"));
  EXPECT_THAT(refusal_of(text("[1, 1]", schedule)),
              HasSubstr("expected each layer once, counted from 0, found 1 twice"));
  EXPECT_THAT(refusal_of(text("[-1, 4], total_layer_num: 4", schedule)),
              AllOf(HasSubstr("below total_layer_num (4), found -1"), HasSubstr("below total_layer_num (4), found 4")));
  EXPECT_EQ(
      refusal_of("{data_efficiency: {enabled: false, data_routing: {enabled: true, random_ltd: {enabled: true}}}}"), "")
      << "what is off may be incomplete";
  EXPECT_THAT(
      refusal_of(text("[1, 2]", "{min_value: 16}")),
      AllOf(HasSubstr("expected max_value"), HasSubstr("expected require_steps"), HasSubstr("expected seq_per_step")));
  EXPECT_THAT(refusal_of(text("[1, 2]",
                              "{min_value: 16, max_value: 8, schedule_type: 'fixed_root', schedule_config: "
                              "{require_steps: 1, seq_per_step: 1}}")),
              AllOf(HasSubstr("expected the schedule_type fixed_linear"),
                    HasSubstr("expected a max_value that is at least min_value (16), found 8")));
}

}  // namespace
}  // namespace ds::engine::config
