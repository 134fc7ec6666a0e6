#include "profiling/monitor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <fstream>

#include "core/check.h"
#include "profiling/tensorboard_monitor.h"
#include "tests/support/file_text.h"
#include "tests/support/grouped_locale.h"
#include "tests/support/scratch_folder.h"

namespace ds::profiling {
namespace {

TEST(CsvMonitor, WritesOneFileForEachName) {
  const test::ScratchFolder folder;
  const auto monitor = make_csv_monitor(folder.path().string(), "job");
  monitor->write_events({{"Train/Samples/lr", 0.001, 8}, {"Train/Samples/loss scale", 65536, 8}});
  monitor->write_events({{"Train/Samples/lr", 0.0001 / 3, 16}, {"plain", -1.5, 2}});
  EXPECT_EQ(test::file_text(folder.path() / "job/Train_Samples_lr.csv"),
            "step,lr\n8,0.001\n16,3.3333333333333335e-05\n");
  EXPECT_EQ(test::file_text(folder.path() / "job/Train_Samples_loss_scale.csv"), "step,loss scale\n8,65536\n");
  EXPECT_EQ(test::file_text(folder.path() / "job/plain.csv"), "step,plain\n2,-1.5\n");
}

TEST(CsvMonitor, ALaterRunAppendsWithoutASecondHeader) {
  const test::ScratchFolder folder;
  make_csv_monitor(folder.path().string(), "job")->write_events({{"a/lr", 1, 1}});
  make_csv_monitor(folder.path().string(), "job")->write_events({{"a/lr", 2, 2}});
  EXPECT_EQ(test::file_text(folder.path() / "job/a_lr.csv"), "step,lr\n1,1\n2,2\n");
}

TEST(CsvMonitor, HasTwoColumnsUnderEveryLocale) {
  const test::ScratchFolder folder;
  const test::GroupedLocale locale;
  make_csv_monitor(folder.path().string(), "job")->write_events({{"a/lr", 0.07, 1032}});
  EXPECT_EQ(test::file_text(folder.path() / "job/a_lr.csv"), "step,lr\n1032,0.07\n");
}

TEST(CsvMonitor, SaysThatTheDiskIsFull) {
  const test::ScratchFolder folder;
  const auto monitor = make_csv_monitor(folder.path().string(), "job");
  std::filesystem::create_symlink("/dev/full", folder.path() / "job/lr.csv");
  try {
    monitor->write_events({{"lr", 1, 1}});
    FAIL() << "expected IoError";
  } catch (const IoError& error) {
    EXPECT_THAT(error.what(), testing::AllOf(testing::HasSubstr("job/lr.csv"), testing::HasSubstr("No space left")));
  }
}

TEST(CsvMonitor, LeavesNothingBehindBeforeTheFirstEvent) {
  const test::ScratchFolder folder;
  make_csv_monitor(folder.path().string(), "job");
  EXPECT_TRUE(std::filesystem::is_empty(folder.path() / "job"));
}

using Maker = std::unique_ptr<Monitor> (*)(const std::string&, const std::string&);

TEST(CsvMonitor, NamesALinkThatLeadsNowhere) {
  const test::ScratchFolder folder;
  std::filesystem::create_symlink("/no/such/disk", folder.path() / "link");
  try {
    make_csv_monitor(folder / "link", "job");
    FAIL() << "expected IoError";
  } catch (const IoError& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr("link is a symbolic link to /no/such/disk, which does not exist"));
  }
}

class AnyMonitor : public testing::TestWithParam<std::pair<const char*, Maker>> {};

TEST_P(AnyMonitor, SaysAtOnceThatItCannotWrite) {
  const test::ScratchFolder folder;
  const std::filesystem::path file = folder.path() / "a_file";
  std::ofstream(file) << "in the way";
  const auto [section, make] = GetParam();
  for (const std::string& path : {file.string(), std::string("/proc/nowhere"), std::string("/sys")}) {
    try {
      make(path, "job");
      FAIL() << "expected IoError for " << path;
    } catch (const IoError& error) {
      EXPECT_THAT(error.what(), testing::AllOf(testing::HasSubstr(section), testing::HasSubstr(path),
                                               testing::HasSubstr("output_path")));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, AnyMonitor,
                         testing::Values(std::pair("csv_monitor", &make_csv_monitor),
                                         std::pair("tensorboard", &make_tensorboard_monitor),
                                         std::pair("metrics.json_lines", &make_json_lines_monitor),
                                         std::pair("metrics.openmetrics", &make_openmetrics_monitor),
                                         std::pair("metrics.mlflow", &make_mlflow_monitor)),
                         [](const auto& test) {
                           std::string name = test.param.first;
                           std::replace(name.begin(), name.end(), '.', '_');
                           return name;
                         });

// The records of a file, each with its two checksums checked.
std::vector<std::string> records_of(const std::string& bytes) {
  std::vector<std::string> records;
  for (size_t at = 0; at < bytes.size();) {
    uint64_t length = 0;
    std::memcpy(&length, bytes.data() + at, sizeof length);
    if (at + 16 + length > bytes.size()) {
      ADD_FAILURE() << "record at " << at << " of length " << length << " ends behind the file";
      return records;
    }
    records.push_back(bytes.substr(at + 12, length));
    EXPECT_EQ(frame_record(records.back()), bytes.substr(at, 16 + length));
    at += 16 + length;
  }
  return records;
}

TEST(TensorBoardMonitor, WritesAVersionAndThenScalars) {
  const test::ScratchFolder folder;
  const auto monitor = make_tensorboard_monitor(folder.path().string(), "job");
  monitor->write_events({{"Train/Samples/lr", 0.25, 300}, {"Train/Samples/loss_scale", 1024, 301}});
  const std::filesystem::directory_iterator files(folder.path() / "job");
  ASSERT_NE(files, std::filesystem::directory_iterator());
  EXPECT_THAT(files->path().filename().string(), testing::StartsWith("events.out.tfevents."));
  const std::vector<std::string> records = records_of(test::file_text(files->path()));
  ASSERT_EQ(records.size(), 3U);
  EXPECT_THAT(records[0], testing::EndsWith("brain.Event:2"));
  double wall_time = 0;
  std::memcpy(&wall_time, records[1].data() + 1, sizeof wall_time);
  EXPECT_GT(wall_time, 1.7e9);
  EXPECT_EQ(records[1], encode_scalar(wall_time, 300, "Train/Samples/lr", 0.25F));
}

TEST(TensorBoardMonitor, EachRunHasItsOwnFile) {
  const test::ScratchFolder folder;
  const auto first = make_tensorboard_monitor(folder.path().string(), "job");
  const auto second = make_tensorboard_monitor(folder.path().string(), "job");
  const std::filesystem::directory_iterator files(folder.path() / "job");
  EXPECT_EQ(std::distance(begin(files), end(files)), 2);
}

}  // namespace
}  // namespace ds::profiling
