// A monitor whose disk is full does not end the training.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "tests/model/small_run.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(MonitorFailure, IsLoggedOnceAndTrainingGoesOn) {
  constexpr int kReportedSteps = 4;
  const test::ScratchFolder folder;
  nlohmann::ordered_json config = small_config(1, 1);
  config["csv_monitor"] = {{"enabled", true}, {"output_path", folder.path().string()}, {"job_name", "full"}};
  config["tensorboard"] = {{"enabled", true}, {"output_path", folder.path().string()}, {"job_name", "curves"}};
  const State expected = TorchRun{.world = 2, .steps = kReportedSteps}.train_adamw();
  ::testing::internal::CaptureStderr();
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), config, communicator).engine;
    if (communicator.rank() == 0) {
      std::filesystem::create_symlink("/dev/full", folder.path() / "full/Train_Samples_lr.csv");
    }
    EXPECT_LT(largest_difference(train(*engine, model, kReportedSteps), expected), 1e-5);
    EXPECT_EQ(engine->global_steps(), kReportedSteps);
  });
  const std::string text = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(text, AllOf(HasSubstr("csv_monitor: cannot write"), HasSubstr("full/Train_Samples_lr.csv"),
                          HasSubstr("No space left on device"), HasSubstr("Training goes on without this monitor")));
  EXPECT_EQ(text.find("cannot write"), text.rfind("cannot write"));
  // The other monitor has all steps.
  uintmax_t bytes = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path() / "curves")) bytes += entry.file_size();
  constexpr uintmax_t kLeastEvent = 40;  // a record, its name and two checksums
  EXPECT_GT(bytes, kReportedSteps * kLeastEvent);
}

}  // namespace
}  // namespace ds::engine
