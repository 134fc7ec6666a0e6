// checkpoint.writer.type "MOCK": a save that writes nothing, and says so.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "tests/model/checkpoint/checkpoint_run.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(MockWriter, LeavesTheDiskAsItIsAndTrainsOn) {
  for (const bool later : {false, true}) {
    for (const int stage : {0, 3}) {
      const test::ScratchFolder folder;
      const std::string dir = (folder.path() / "none").string();
      State plain;
      test::run_ranks(2, [&](comm::Communicator& communicator) {
        CarriedNet model;
        const auto engine = start(model.ptr(), carried_config(stage, 2), communicator).engine;
        const State end = train_until(*engine, model, 5);
        if (communicator.rank() == 0) plain = end;
      });
      testing::internal::CaptureStderr();
      test::run_ranks(2, [&](comm::Communicator& communicator) {
        CarriedNet model;
        nlohmann::ordered_json config = carried_config(stage, 2);
        config["checkpoint"]["writer"] = {{"type", "mock"}, {"decoupled", later}};
        const auto engine = start(model.ptr(), config, communicator).engine;
        for (int64_t step = 1; step <= 3; ++step) {
          train_until(*engine, model, step);
          EXPECT_EQ(engine->save_checkpoint(dir), "");
        }
        engine->wait_for_checkpoint();
        EXPECT_FALSE(engine->load_checkpoint(dir));
        EXPECT_EQ(largest_difference(train_until(*engine, model, 5), plain), 0.0);
      });
      const std::string log = testing::internal::GetCapturedStderr();
      const std::string said = "writer.type is MOCK";
      EXPECT_THAT(log, HasSubstr(said));
      EXPECT_THAT(log.substr(log.find(said) + 1), Not(HasSubstr(said)));  // once
      EXPECT_FALSE(std::filesystem::exists(dir));
    }
  }
}

// What was there stays, and is still what a load finds.
TEST(MockWriter, LatestStaysWhatItWas) {
  const test::ScratchFolder folder;
  const std::string dir = folder.path().string();
  test::run_ranks(1, [&](comm::Communicator& communicator) {
    CarriedNet model;
    {
      const auto engine = start(model.ptr(), carried_config(1, 1), communicator).engine;
      train_until(*engine, model, 1);
      engine->save_checkpoint(dir, "kept");
    }
    nlohmann::ordered_json config = carried_config(1, 1);
    config["checkpoint"] = {{"writer", {{"type", "MOCK"}}}, {"keep_last", 1}};
    const auto engine = start(model.ptr(), config, communicator).engine;
    train_until(*engine, model, 2);
    engine->save_checkpoint(dir, "new");
    engine->save_checkpoint(dir, "kept");
    EXPECT_EQ(engine->load_checkpoint(dir).tag, "kept");
    EXPECT_EQ(engine->global_steps(), 1);
  });
}

}  // namespace
}  // namespace ds::engine
