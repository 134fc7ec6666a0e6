// The same orders as torch.distributed.pipelining, where it has the schedule and accepts the numbers.
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>
#include <string>

#include "pipeline/schedule/schedule.h"
#include "pipeline/schedule/schedule_file.h"

namespace ds::pipeline {
namespace {

// Of one section of torch_schedules.csv.
void expect_same_order(const std::string& heading, const std::string& csv) {
  std::istringstream words(heading);
  std::string hash;
  std::string kind;
  ScheduleShape shape;
  words >> hash >> kind >> shape.ranks >> shape.chunks >> shape.micro_batches;
  ASSERT_TRUE(words) << heading;
  const Schedule torch = parse_schedule(csv, heading);
  const Schedule ours = make_schedule(parse_schedule_kind(kind), shape);
  EXPECT_EQ(ours.rank_of, torch.rank_of) << heading;
  EXPECT_EQ(to_csv(ours), to_csv(torch)) << heading;
  EXPECT_EQ(ours.actions, torch.actions) << heading;
}

TEST(TorchSchedules, OrdersAreTheSame) {
  std::ifstream file(DS_SOURCE_DIR "/tests/pipeline/schedule/torch_schedules.csv");
  ASSERT_TRUE(file.good());
  std::string heading;
  std::string csv;
  std::string line;
  int sections = 0;
  while (std::getline(file, line)) {
    if (!line.starts_with('#')) {
      csv += line + "\n";
      continue;
    }
    if (!csv.empty()) expect_same_order(heading, csv);
    heading = line;
    csv.clear();
    ++sections;
  }
  expect_same_order(heading, csv);
  EXPECT_EQ(sections, 22);
}

}  // namespace
}  // namespace ds::pipeline
