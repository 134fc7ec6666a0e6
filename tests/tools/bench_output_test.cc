#include "tools/bench/bench_output.h"

#include <gmock/gmock.h>

#include <nlohmann/json.hpp>
#include <sstream>

namespace ds::tool::bench {
namespace {

using ::testing::HasSubstr;

const BenchSetting kSetting{
    .version = "1", .choice = "shm", .device = "cpu", .ranks = {"a", "b"}, .dtype = "float32", .redop = "sum"};

std::vector<Row> rows() {
  Row both{.operation = Operation::kAllGather, .amount = {.count = 128, .bytes = 1024}};
  both.out_of_place = Measurement{.microseconds = 10, .algbw = 2, .busbw = 1, .wrong = 0};
  both.in_place = Measurement{.microseconds = 20, .algbw = 6, .busbw = 3, .wrong = 5};
  Row barrier{.operation = Operation::kBarrier};
  barrier.out_of_place = Measurement{.microseconds = 7};
  return {both, barrier};
}

TEST(BenchOutput, AveragesBothWaysAndCountsWrongElements) {
  EXPECT_DOUBLE_EQ(mean_busbw(rows(), Operation::kAllGather), 2.0);
  EXPECT_DOUBLE_EQ(mean_busbw(rows(), Operation::kReduce), 0.0);
  EXPECT_EQ(total_wrong(rows()), 5);
  EXPECT_EQ(exit_code_of(rows()), 1);
  EXPECT_EQ(exit_code_of({}), 0);
}

TEST(BenchOutput, IsOneJsonObject) {
  std::ostringstream out;
  print_json(kSetting, rows(), out);
  const auto json = nlohmann::json::parse(out.str());
  ASSERT_EQ(json["results"].size(), 3U);
  EXPECT_EQ(json["results"][1]["in_place"], true);
  EXPECT_EQ(json["results"][1]["wrong"], 5);
  EXPECT_EQ(json["results"][2]["time_us"], 7.0);
  EXPECT_FALSE(json["results"][2].contains("busbw"));
  EXPECT_EQ(json["mean_busbw"]["all_gather"], 2.0);
  EXPECT_EQ(json["wrong"], 5);
}

TEST(BenchOutput, HasALineForEachSize) {
  std::ostringstream out;
  print_row(rows()[0], kSetting, out);
  std::istringstream words(out.str());
  std::vector<std::string> cells{std::istream_iterator<std::string>(words), {}};
  EXPECT_THAT(cells, ::testing::ElementsAre("1024", "128", "float32", "none", "-1", "10.00", "2.00", "1.00", "0",
                                            "20.00", "6.00", "3.00", "5"));
  std::ostringstream summary;
  print_summary(rows(), summary);
  EXPECT_THAT(summary.str(), HasSubstr("# Wrong elements: 5 FAILED"));
}

TEST(BenchOutput, SaysWhenNobodyLookedForWrongElements) {
  Row row{.operation = Operation::kAllReduce};
  row.in_place = Measurement{.microseconds = 1};
  std::ostringstream summary;
  print_summary({row}, summary);
  EXPECT_THAT(summary.str(), HasSubstr("# Wrong elements: not looked for"));
  std::ostringstream json;
  print_json(kSetting, {row}, json);
  EXPECT_TRUE(nlohmann::json::parse(json.str())["wrong"].is_null());
}

}  // namespace
}  // namespace ds::tool::bench
