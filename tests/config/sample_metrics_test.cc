// curriculum_metrics of a ds_config: what they give, and what is wrong with them, by name.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "config/plan/plan.h"
#include "config/supported.h"
#include "tests/config/parse_text.h"

namespace ds::engine::config {
namespace {

using testing::AllOf;
using testing::Contains;
using testing::HasSubstr;

std::string sampling(const std::string& metrics, const std::string& more = "") {
  return "{data_efficiency: {enabled: true, data_sampling: {enabled: true, " + more +
         "curriculum_learning: {enabled: true, curriculum_metrics: " + metrics + "}}}}";
}

const char* const kLength =
    "length: {index_to_sample_path: 'a/is', index_to_metric_path: 'a/im', difficulty_type: 'value', clustering_type: "
    "'schedule_based', min_difficulty: 8, max_difficulty: 64, schedule_type: 'fixed_linear', schedule_config: "
    "{total_curriculum_step: 10, difficulty_step: 8}}";
const char* const kRarity =
    "rarity: {index_to_sample_path: 'b/is', difficulty_type: 'percentile', clustering_type: 'schedule_based', "
    "min_difficulty: 1, max_difficulty: 100, schedule_type: 'fixed_root', schedule_config: {total_curriculum_step: 10, "
    "difficulty_step: 1, root_degree: 2}}";
const char* const kCrop =
    "crop: {difficulty_type: 'value', clustering_type: 'single_cluster', min_difficulty: 8, max_difficulty: 64, "
    "schedule_type: 'custom'}";

std::string metrics(const std::vector<std::string>& each) {
  std::string text = "{";
  for (const std::string& one : each) text += (text.size() > 1 ? ", " : "") + one;
  return text + "}";
}

TEST(SampleMetrics, AreThoseOfTheFileInItsOrder) {
  const DsConfig config = parse_text(sampling(metrics({kRarity, kLength, kCrop})));
  EXPECT_TRUE(config.data_efficiency.chooses_samples());
  EXPECT_TRUE(unsupported_features(config).empty());
  const auto& read = config.data_efficiency.data_sampling.curriculum_learning.metrics;
  ASSERT_EQ(read.size(), 3U);
  EXPECT_EQ(read[0].name, "rarity");
  EXPECT_EQ(read[0].index_to_sample_path, "b/is");
  EXPECT_TRUE(read[0].by_percentile);
  EXPECT_TRUE(read[0].chooses);
  EXPECT_EQ(read[0].schedule.at(10), 100);
  EXPECT_EQ(read[1].index_to_metric_path, "a/im");
  EXPECT_FALSE(read[1].by_percentile);
  EXPECT_EQ(read[1].schedule.at(5), 32);
  EXPECT_FALSE(read[2].chooses);
  EXPECT_EQ(read[2].schedule.kind, efficiency::DifficultySchedule::Kind::kCustom);
}

TEST(SampleMetrics, WhatIsMissingOrWrongIsNamed) {
  const std::string at = "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics";
  EXPECT_THAT(refusal_of(sampling("null")), HasSubstr(at + ": expected an object, one entry for each metric"));
  EXPECT_THAT(refusal_of(sampling("{}")), HasSubstr(at + ": expected an object, one entry for each metric"));
  EXPECT_THAT(refusal_of(sampling("{length: 3}")), HasSubstr(at + ".length"));
  EXPECT_THAT(refusal_of(sampling("{length: {clustering_type: 'schedule_based'}}")),
              AllOf(HasSubstr(at + ".length.difficulty_type: expected value or percentile, found none"),
                    HasSubstr(at + ".length.index_to_sample_path: expected the path of a file"),
                    HasSubstr(at + ".length.min_difficulty: expected an integer > 0, found none"),
                    HasSubstr(at + ".length.schedule_type: expected fixed_linear")));
  EXPECT_THAT(refusal_of(sampling("{length: {difficulty_type: 'value'}}")),
              HasSubstr(at + ".length.clustering_type: expected single_cluster or schedule_based, found none"));
  EXPECT_THAT(refusal_of(sampling("{length: {difficulty_type: 'percent'}}")),
              HasSubstr("length.difficulty_type: expected one of \"value\", \"percentile\""));
  std::string without = kLength;
  without.replace(without.find("index_to_metric_path: 'a/im', "), 30, "");
  EXPECT_THAT(refusal_of(sampling(metrics({without}))),
              HasSubstr("length.index_to_metric_path: expected the path of a file of DeepSpeed's DataAnalyzer, without "
                        ".bin and .idx, found none; difficulty_type value needs it"));
  EXPECT_THAT(
      refusal_of(sampling("{a: {index_to_sample_path: 'b', difficulty_type: 'percentile', clustering_type: "
                          "'schedule_based', min_difficulty: 1, max_difficulty: 9, schedule_type: 'fixed_discrete', "
                          "schedule_config: {difficulty: [3, 2, 9], max_step: [1, 2]}}}")),
      HasSubstr("a.schedule_config: expected difficulties that do not fall, for samples that are admitted stay so, "
                "found 2 behind 3"));
  std::string misspelt = kLength;
  misspelt.replace(misspelt.find("max_difficulty"), 14, "max_dificulty");
  EXPECT_THAT(refusal_of(sampling(metrics({misspelt}))), HasSubstr("max_dificulty"));
}

TEST(SampleMetrics, WhatIsOffMayBeIncomplete) {
  EXPECT_EQ(refusal_of("{data_efficiency: {enabled: true, data_sampling: {enabled: true, curriculum_learning: "
                       "{enabled: false, curriculum_metrics: {length: {}}}}}}"),
            "");
  const DsConfig config = parse_text("{data_efficiency: {enabled: true, data_sampling: {enabled: true}}}");
  EXPECT_FALSE(config.data_efficiency.chooses_samples());
  EXPECT_TRUE(unsupported_features(config).empty());
}

TEST(SampleMetrics, ThePlanSaysWhatIsChosenAndWhatHasNoEffect) {
  const auto rows_of = [](const std::string& text) {
    const Plan plan = make_plan(parse_text(text), {.world_size = 1, .dp = 1}, {});
    std::vector<std::string> rows;
    for (const auto& row : plan.rows) rows.push_back(row.what + ": " + row.choice + ": " + row.reason);
    return rows;
  };
  const auto rows = rows_of(sampling(metrics({kLength, kRarity, kCrop}), "num_workers: 2, pin_memory: true, "));
  EXPECT_THAT(rows, Contains(HasSubstr("data sampling: length 8 to 64, fixed_linear; rarity percentile 1 to 100, "
                                       "fixed_root; crop 8 to 64, custom, for the program")));
  EXPECT_THAT(rows, Not(Contains(HasSubstr("num_workers"))));
  EXPECT_THAT(rows, Contains(HasSubstr("pin_memory: no effect")));
  EXPECT_THAT(rows_of("{data_efficiency: {enabled: true, data_sampling: {enabled: true}}}"),
              Contains(HasSubstr("data_sampling: no effect")));
}

}  // namespace
}  // namespace ds::engine::config
