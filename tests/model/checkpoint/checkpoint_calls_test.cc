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

// Checkpoints of other names and of other runs are nobody's to remove; those of the run that goes on are.
TEST(CheckpointCalls, KeepLastRemovesWhatItHasSavedAndSaysSo) {
  const test::ScratchFolder folder;
  const std::string dir = folder.path().string();
  const auto is_there = [&](const char* tag) { return std::filesystem::exists(std::filesystem::path(dir) / tag); };
  const auto run = [&](const char* resume, int steps) {
    run_ranks(2, [&](comm::Communicator& communicator) {
      SmallNet model;
      const auto engine = start(model.ptr(), small_config(2, 1), communicator).engine;
      if (resume != nullptr) engine->load_checkpoint(dir, resume);
      for (int step = 0; step < steps; ++step) {
        train(*engine, model, 1);
        if (steps == 3 && step == 0) engine->save_checkpoint(dir, "best", {.save_latest = false});
        engine->save_checkpoint(dir, cat(steps == 1 ? "other" : "step", engine->global_steps()), {.keep_last = 2});
      }
    });
  };
  testing::internal::CaptureStderr();
  testing::internal::CaptureStdout();
  run(nullptr, 3);
  const std::string said = testing::internal::GetCapturedStderr() + testing::internal::GetCapturedStdout();
  EXPECT_THAT(said, HasSubstr("the older \"step1\""));
  EXPECT_TRUE(is_there("best") && is_there("step2") && is_there("step3") && !is_there("step1"));
  run(nullptr, 1);  // another run: its first checkpoint
  EXPECT_TRUE(is_there("step2") && is_there("step3") && is_there("other1"));
  run("best", 2);  // the first run goes on, from a checkpoint that keep_last does not count
  EXPECT_TRUE(is_there("best") && is_there("step2") && is_there("step3") && is_there("other1"));
  run("step3", 2);
  EXPECT_TRUE(is_there("best") && is_there("step4") && is_there("step5") && is_there("other1"));
  EXPECT_FALSE(is_there("step2") || is_there("step3"));
}

// The best model so far is kept beside the checkpoints that restarts need.
TEST(CheckpointCalls, TheConfigsKeepLastLeavesAloneWhatLatestDoesNotName) {
  const test::ScratchFolder folder;
  const std::string dir = folder.path().string();
  run_ranks(1, [&](comm::Communicator& communicator) {
    SmallNet model;
    ordered_json config = small_config(0, 1);
    config["checkpoint"] = {{"keep_last", 1}};
    const auto engine = start(model.ptr(), config, communicator).engine;
    engine->save_checkpoint(dir, "best", {.save_latest = false});
    for (int step = 0; step < 3; ++step) {  // until the next save `latest` holds the one before
      train(*engine, model, 1);
      engine->save_checkpoint(dir);
    }
  });
  EXPECT_TRUE(std::filesystem::exists(dir + "/best"));
  EXPECT_FALSE(std::filesystem::exists(dir + "/global_step1"));
}

TEST(CheckpointCalls, TwoEnginesDoNotSaveIntoOneTag) {
  const test::ScratchFolder folder;
  const std::string dir = folder.path().string();
  run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet generator;
    SmallNet discriminator;
    auto one = start(generator.ptr(), small_config(1, 1), communicator).engine;
    const auto other = start(discriminator.ptr(), small_config(1, 1), communicator).engine;
    one->save_checkpoint(dir, "tag");
    try {
      other->save_checkpoint(dir, "tag");
      ADD_FAILURE() << "the first engine's checkpoint was lost";
    } catch (const UsageError& error) {
      EXPECT_EQ(communicator.rank(), 0);
      EXPECT_THAT(error.what(), HasSubstr("another engine of this program"));
    } catch (const IoError& error) {
      EXPECT_EQ(communicator.rank(), 1);
      EXPECT_THAT(error.what(), HasSubstr("rank 0"));
    }
    other->save_checkpoint(dir + "/other", "tag");
    train(*one, generator, 1);
    one->load_checkpoint(dir, "tag");  // a rollback, and the same tag again
    one->save_checkpoint(dir, "tag");
    EXPECT_TRUE(other->load_checkpoint(dir, "tag"));
    one.reset();
    communicator.barrier();
    other->save_checkpoint(dir, "tag");
  });
}

}  // namespace
}  // namespace ds::engine
