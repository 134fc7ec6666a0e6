// Elasticity: the batch sizes, against DeepSpeed, and what a config makes of them.
#include "config/elastic_batch.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>

#include "tests/config/parse_text.h"
#include "tests/support/thrown.h"

namespace ds::engine::config {
namespace {

using nlohmann::ordered_json;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

ElasticitySection section_of(const ordered_json& json) {
  ordered_json config = {{"elasticity", json}};
  config["elasticity"]["enabled"] = false;  // read it, decide nothing
  config["train_batch_size"] = 1;
  return parse(config, {}).elasticity;
}

// The valid sizes as the reference keeps them: both ends of a long list.
std::vector<int64_t> ends(const std::vector<int64_t>& sizes) {
  if (sizes.size() <= 20) return sizes;
  std::vector<int64_t> ends(sizes.begin(), sizes.begin() + 10);
  ends.insert(ends.end(), sizes.end() - 10, sizes.end());
  return ends;
}

// elastic_reference.py made the file with DeepSpeed 0.18.3 and the limit of 0.19.6.
TEST(ElasticBatch, IsDeepSpeeds) {
  std::ifstream in(std::string(DS_SOURCE_DIR) + "/tests/config/elastic_reference.json");
  const ordered_json cases = ordered_json::parse(in);
  ASSERT_EQ(cases.size(), 300U);
  int accepted = 0;
  for (const ordered_json& expected : cases) {
    SCOPED_TRACE(expected.dump());
    const ElasticitySection section = section_of(expected["elasticity"]);
    const auto size = expected["size"].get<int64_t>();
    if (expected.contains("refused")) {
      EXPECT_THROW(elastic_batch(section, size), ConfigError);
      continue;
    }
    ++accepted;
    const ElasticBatch found = elastic_batch(section, size);
    EXPECT_EQ(found.train, expected["batch"].get<int64_t>());
    EXPECT_EQ(found.micro, expected["micro"].get<int64_t>());
    EXPECT_EQ(found.micro * found.accumulation * size, found.train);
    const auto valid = expected["valid"].get<std::vector<int64_t>>();
    if (std::binary_search(found.valid.begin(), found.valid.end(), size)) {
      EXPECT_EQ(ends(found.valid), valid);
      EXPECT_EQ(found.valid.size(), expected.value("count", valid.size()));
    } else {
      EXPECT_THAT(valid, ElementsAre(size));  // version 0.2 takes it all the same
    }
  }
  EXPECT_GT(accepted, 100);
}

TEST(ElasticBatch, IsNeverAboveItsMaximum) {
  const auto batch_of = [](int64_t max_batch, std::vector<int64_t> micro_batches) {
    return elastic_batch(section_of({{"max_train_batch_size", max_batch},
                                     {"micro_batch_sizes", std::move(micro_batches)},
                                     {"version", 0.1}}),
                         1)
        .train;
  };
  EXPECT_EQ(batch_of(100, {8, 10, 12}), 96);  // their common multiple is 120
  EXPECT_EQ(batch_of(120, {8, 10, 12}), 120);
}

constexpr const char* kOld =
    "{elasticity: {enabled: true, max_train_batch_size: 50, micro_batch_sizes: [2, 3], version: 0.1}}";
constexpr const char* kNew = "{elasticity: {enabled: true, max_train_batch_size: 50, micro_batch_sizes: [2, 3]}}";

DsConfig parse_elastic(const std::string& text, const ParseOptions& options) { return parse(object_of(text), options); }

std::string elastic_refusal(const std::string& text, const ParseOptions& options) {
  return test::thrown_by<ConfigError>([&] { parse_elastic(text, options); }, "");
}

TEST(Elasticity, KeepsTheBatchOnAllValidWorldSizes) {
  for (const char* text : {kOld, kNew}) {
    for (const int64_t ranks : {1, 2, 3, 4, 6, 8, 12}) {
      const DsConfig config = parse_elastic(text, {.world_size = ranks});
      EXPECT_EQ(config.train_batch_size, 48) << ranks;
      EXPECT_EQ(config.train_micro_batch_size_per_gpu * config.gradient_accumulation_steps * ranks, 48);
      EXPECT_THAT(config.elastic->valid, ElementsAre(1, 2, 3, 4, 6, 8, 12, 16, 24));
      EXPECT_THAT(config.warnings, ElementsAre());
    }
  }
}

TEST(Elasticity, RefusesAWorldSizeThatIsNotValid) {
  EXPECT_THAT(elastic_refusal(kOld, {.world_size = 5}),
              AllOf(HasSubstr("elasticity: "), HasSubstr("5 data-parallel ranks are no valid world size"),
                    HasSubstr("nearest valid: 4 or 6")));
  EXPECT_THAT(elastic_refusal(kOld, {.world_size = 25}), HasSubstr("nearest valid: 24"));
  EXPECT_THAT(elastic_refusal(kNew, {.world_size = 51}), HasSubstr("nearest valid: 24"));
}

TEST(Elasticity, SaysThatVersion02ChangesTheBatch) {
  const DsConfig config = parse_elastic(kNew, {.world_size = 5});
  EXPECT_EQ(config.train_batch_size, 50);
  EXPECT_THAT(config.warnings, ElementsAre(AllOf(HasSubstr("5 data-parallel ranks train with a batch of 50, not with "
                                                           "the 48 of the valid world sizes (nearest: 4 or 6)"))));
}

TEST(Elasticity, CountsDataParallelRanksOfAPipeline) {
  const std::string text =
      "{pipeline: {stages: 2}, elasticity: {enabled: true, max_train_batch_size: 50, micro_batch_sizes: [2, 3], ";
  EXPECT_EQ(parse_elastic(text + "version: 0.1}}", {.world_size = 8}).gradient_accumulation_steps, 4);
  const DsConfig config = parse_elastic(text + "num_gpus_per_node: 4, model_parallel_size: 2}}", {.world_size = 8});
  EXPECT_EQ(config.train_batch_size, 48);
  EXPECT_THAT(elastic_refusal(text + "num_gpus_per_node: 6, model_parallel_size: 3}}", {.world_size = 8}),
              HasSubstr("expected 1 or the 2 stages of the pipeline, found 3"));
}

TEST(Elasticity, ReplacesTheBatchSizesOfTheFile) {
  const std::string text =
      "{train_batch_size: 7, elasticity: {enabled: true, max_train_batch_size: 50, micro_batch_sizes: [2, 3], "
      "ignore_non_elastic_batch_info: true}}";
  const DsConfig config = parse_elastic(text, {.world_size = 4});
  EXPECT_EQ(config.train_batch_size, 48);
  EXPECT_THAT(config.warnings, ElementsAre(HasSubstr("is ignored, elasticity sets it to 48")));
}

TEST(Elasticity, SaysWhatIsWrongWithTheSection) {
  const auto refusal = [](const std::string& keys) {
    return elastic_refusal("{elasticity: {enabled: true, max_train_batch_size: 50, " + keys + "}}", {.world_size = 1});
  };
  EXPECT_THAT(refusal("micro_batch_sizes: []"), HasSubstr("expected integers > 0, found none"));
  EXPECT_THAT(refusal("micro_batch_sizes: [2, 0]"), HasSubstr("expected integers > 0, found 0"));
  EXPECT_THAT(refusal("micro_batch_sizes: [64]"), HasSubstr("micro_batch_sizes has 64, above the 50 samples"));
  EXPECT_THAT(refusal("micro_batch_sizes: [2], version: 0.3"), HasSubstr("expected 0.1 or 0.2, found 0.3"));
  EXPECT_THAT(refusal("micro_batch_sizes: [2], min_gpus: 3, max_gpus: 2"), HasSubstr("found 3 and 2"));
  EXPECT_THAT(refusal("micro_batch_sizes: [2], num_gpus_per_node: 3, model_parallel_size: 2"),
              HasSubstr("expected a multiple of model_parallel_size 2, found 3"));
}

TEST(Elasticity, ComparesWithWhatTheSchedulerHasSeen) {
  const auto refusal_with = [](const char* seen) {
    setenv("DEEPSPEED_ELASTICITY_CONFIG", seen, 1);
    const std::string text = elastic_refusal(kNew, {.world_size = 1});
    unsetenv("DEEPSPEED_ELASTICITY_CONFIG");
    return text;
  };
  EXPECT_EQ(refusal_with(R"({"enabled": true, "max_train_batch_size": 50, "micro_batch_sizes": [2, 3]})"), "");
  EXPECT_THAT(refusal_with(R"({"max_train_batch_size": 60, "micro_batch_sizes": [2, 3]})"),
              AllOf(HasSubstr("elasticity.max_train_batch_size"), HasSubstr("has seen 60"),
                    Not(HasSubstr("elasticity.micro_batch_sizes"))));
  EXPECT_THAT(refusal_with(R"({"max_train_batch_size": 50, "micro_batch_sizes": [2], "version": 0.1})"),
              AllOf(HasSubstr("found [2,3], but the scheduler of the job has seen [2]"), HasSubstr("has seen 0.1")));
  EXPECT_THAT(refusal_with("yes"), HasSubstr("is no JSON object"));
}

}  // namespace
}  // namespace ds::engine::config
