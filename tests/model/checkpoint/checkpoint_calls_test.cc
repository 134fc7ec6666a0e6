// Calls in the wrong place, tags, and what stays of older checkpoints.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <string>

#include "checkpoint/folder_source.h"
#include "core/check.h"
#include "core/text.h"
#include "tests/model/checkpoint/checkpoint_run.h"
#include "tests/model/offloaded/offload_run.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using test::run_ranks;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(CheckpointCalls, OutOfPlace) {
  const test::ScratchFolder folder;
  const std::string dir = folder.path().string();
  for (const int stage : {0, 1, 3}) {
    run_ranks(2, [&](comm::Communicator& communicator) {
      SmallNet model;
      const auto engine = start(model.ptr(), small_config(stage, 2), communicator).engine;
      engine->save_checkpoint(dir, "tag");
      const auto load_refused = [&](const char* text) {
        EXPECT_THAT([&] { engine->load_checkpoint(dir, "tag"); }, ThrowsMessage<UsageError>(HasSubstr(text)));
      };
      const auto refused = [&](const char* text) {
        EXPECT_THAT([&] { engine->save_checkpoint(dir, "other"); }, ThrowsMessage<UsageError>(HasSubstr(text)));
        load_refused(text);
      };
      engine->backward(model->loss(sample(0, communicator.rank())));
      load_refused("between backward() and step()");
      engine->step();
      load_refused("1 of 2");
      engine->backward(model->loss(sample(1, communicator.rank())));
      engine->step();
      {
        const auto whole = engine->gathered_parameters({model->first->weight});
        refused("gathered_parameters");
      }
      engine->offload_states();
      refused("reload_states");
      engine->reload_states();
      engine->save_checkpoint(dir, "other");
      engine->load_checkpoint(dir, "tag");
      EXPECT_EQ(engine->global_steps(), 0);
      EXPECT_EQ(train(*engine, model, 1).size(), 6U);
    });
    EXPECT_EQ(checkpoint::verify(dir + "/other").size(), 0U);
  }
}

TEST(CheckpointCalls, WhatHasNoPlaceInAFile) {
  const test::ScratchFolder folder;
  const std::string dir = folder.path().string();
  run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), small_config(1, 1), communicator).engine;
    EXPECT_ANY_THROW(engine->save_checkpoint(dir, "tag", {.client_state = {{"text", "\xff\xfe"}}}));
    EXPECT_ANY_THROW(engine->save_checkpoint(dir, "a/b"));
    EXPECT_ANY_THROW(engine->save_checkpoint(dir, ".."));
    EXPECT_ANY_THROW(engine->save_checkpoint(dir, "latest"));
    model->register_buffer("complex", torch::zeros({2}, torch::kComplexFloat));
    EXPECT_ANY_THROW(engine->save_checkpoint(dir, "tag"));
    EXPECT_FALSE(engine->load_checkpoint(dir));
    train(*engine, model, 1);
  });
  EXPECT_TRUE(!std::filesystem::exists(dir) || std::filesystem::is_empty(dir));
}

TEST(CheckpointCalls, TagsThatDiffer) {
  for (const char* mode : {"Ignore", "Warn", "Fail"}) {
    const test::ScratchFolder folder;
    const std::string dir = folder.path().string();
    run_ranks(3, [&](comm::Communicator& communicator) {
      SmallNet model;
      ordered_json config = small_config(1, 1);
      config["checkpoint"] = {{"tag_validation", mode}};
      const auto engine = start(model.ptr(), config, communicator).engine;
      const auto save = [&] { return engine->save_checkpoint(dir, cat("tag", communicator.rank() / 2)); };
      if (mode == std::string("Fail")) {
        EXPECT_THAT(save, ThrowsMessage<ConfigError>(HasSubstr("tag_validation")));
        EXPECT_TRUE(engine->save_checkpoint(dir, "tag0").ends_with("tag0"));
      } else {
        EXPECT_TRUE(save().ends_with("tag0"));
      }
    });
    EXPECT_EQ(checkpoint::verify(dir + "/tag0").size(), 0U);
    EXPECT_FALSE(std::filesystem::exists(dir + "/tag1"));
  }
}

TEST(CheckpointCalls, KeepLastAndLatest) {
  const test::ScratchFolder folder;
  const std::string dir = folder.path().string();
  run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    ordered_json config = small_config(2, 1);
    config["checkpoint"] = {{"keep_last", 2}};
    const auto engine = start(model.ptr(), config, communicator).engine;
    for (int step = 0; step < 4; ++step) {
      train(*engine, model, 1);
      EXPECT_EQ(engine->save_checkpoint(dir), dir + cat("/global_step", step + 1));
    }
    EXPECT_FALSE(std::filesystem::exists(dir + "/global_step2"));
    EXPECT_TRUE(std::filesystem::exists(dir + "/global_step3"));
    communicator.barrier();
    train(*engine, model, 1);
    engine->save_checkpoint(dir, "side", {.save_latest = false, .keep_last = 0});
    EXPECT_TRUE(std::filesystem::exists(dir + "/global_step3"));
    const LoadedCheckpoint loaded = engine->load_checkpoint(dir);
    EXPECT_EQ(loaded.tag, "global_step4");
    EXPECT_EQ(loaded.path, dir + "/global_step4");
    EXPECT_EQ(engine->global_steps(), 4);
  });
}

}  // namespace
}  // namespace ds::engine
