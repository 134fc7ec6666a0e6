// Checkpoints that are missing or damaged: the newest whole one, or an error, and never a mixture.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "checkpoint/tag_folder.h"
#include "core/check.h"
#include "core/text.h"
#include "tests/model/checkpoint/checkpoint_run.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

namespace fs = std::filesystem;
using test::run_ranks;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

// Flips one bit of a file, `from_end` bytes before its end.
void flip(const fs::path& file, int64_t from_end = 3) {
  std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
  stream.seekg(-from_end, std::ios::end);
  const char byte = static_cast<char>(stream.get() ^ 4);
  stream.seekp(-from_end, std::ios::end);
  stream.put(byte);
}

class CheckpointRecovery : public ::testing::TestWithParam<int> {
 protected:
  static constexpr int kRanks = 2;
  nlohmann::ordered_json config() const { return carried_config(GetParam(), kRanks); }

  // global_step1, 2 and 3, and the weights of each.
  void SetUp() override {
    run_ranks(kRanks, [&](comm::Communicator& communicator) {
      CarriedNet model;
      const auto engine = start(model.ptr(), config(), communicator).engine;
      for (int64_t step = 1; step <= 3; ++step) {
        const State weights = train_until(*engine, model, step);
        if (communicator.rank() == 0) weights_.push_back(weights);
        engine->save_checkpoint(dir());
      }
    });
  }
  // What all ranks load without a tag: the number of the step, 0 for nothing.
  int64_t loaded_step() {
    int64_t step = -1;
    testing::internal::CaptureStderr();
    testing::internal::CaptureStdout();
    run_ranks(kRanks, [&](comm::Communicator& communicator) {
      CarriedNet model;
      const auto engine = start(model.ptr(), config(), communicator).engine;
      const LoadedCheckpoint loaded = engine->load_checkpoint(dir());
      EXPECT_EQ(static_cast<bool>(loaded), engine->global_steps() > 0);
      const State weights = copy_of(engine->fp32_state_dict());
      if (engine->global_steps() > 0) {
        const auto index = static_cast<size_t>(engine->global_steps() - 1);
        EXPECT_EQ(largest_difference(weights, weights_.at(index)), 0.0);
      }
      train_until(*engine, model, engine->global_steps() + 1);
      if (communicator.rank() == 0) step = engine->global_steps() - 1;
    });
    said_ = testing::internal::GetCapturedStdout() + testing::internal::GetCapturedStderr();
    return step;
  }
  std::string dir() const { return folder_.path().string(); }
  fs::path tag(int64_t step) const { return folder_.path() / cat("global_step", step); }
  fs::path weights_of(int64_t step, int rank) const {
    return tag(step) / cat("weights-0000", rank, "-of-0000", kRanks, ".safetensors");
  }
  void say_latest(const std::string& text) const { std::ofstream(dir() + "/latest") << text; }

  test::ScratchFolder folder_;
  std::vector<State> weights_;
  std::string said_;
};

INSTANTIATE_TEST_SUITE_P(Stages, CheckpointRecovery, ::testing::Values(0, 1, 3));

TEST_P(CheckpointRecovery, TheOneThatLatestNames) {
  EXPECT_EQ(loaded_step(), 3);
  say_latest("global_step2\n");
  EXPECT_EQ(loaded_step(), 2);
}

TEST_P(CheckpointRecovery, LatestThatIsMissingOrWrong) {
  fs::remove(dir() + "/latest");
  EXPECT_EQ(loaded_step(), 3);
  for (const char* text : {"", "global_step9", "..", "/", "a/b", "global_step2\nglobal_step1", "\n\n"}) {
    say_latest(text);
    EXPECT_EQ(loaded_step(), 3) << text;
  }
  fs::remove(dir() + "/latest");
  fs::create_directory(dir() + "/latest");
  EXPECT_EQ(loaded_step(), 3);
}

TEST_P(CheckpointRecovery, DamageOfAnyFileFallsBackAndSaysSo) {
  fs::resize_file(tag(3) / "index.json", 50);
  EXPECT_EQ(loaded_step(), 2);
  EXPECT_THAT(said_, AllOf(HasSubstr("global_step3"), HasSubstr("index.json"), HasSubstr("Falling back to"),
                           HasSubstr("global_step2")));
  flip(weights_of(2, 1));  // what another rank than the first needs
  EXPECT_EQ(loaded_step(), 1);
  EXPECT_THAT(said_, AllOf(HasSubstr("global_step2"), HasSubstr("global_step1")));
}

TEST_P(CheckpointRecovery, OneRanksFileOfEachKind) {
  for (const char* kind : {"weights", "optimizer", "ranks"}) {
    for (int rank = 0; rank < kRanks; ++rank) {
      const fs::path file = tag(3) / cat(kind, "-0000", rank, "-of-0000", kRanks, ".safetensors");
      flip(file);
      EXPECT_EQ(loaded_step(), 2) << file;
      flip(file);
      EXPECT_EQ(loaded_step(), 3) << file;
      fs::rename(file, dir() + "/away");
      EXPECT_EQ(loaded_step(), 2) << file;
      fs::rename(dir() + "/away", file);
    }
  }
}

TEST_P(CheckpointRecovery, WhatAKilledJobLeft) {
  fs::rename(tag(3), checkpoint::new_save(dir(), "global_step3").incomplete);
  EXPECT_EQ(loaded_step(), 2);
  fs::rename(tag(2), folder_.path() / ".global_step2.replaced");
  EXPECT_EQ(loaded_step(), 2);  // put back
}

// The folder of a tag as load_dir, and a link to a disk that is not there: training must not begin anew in silence.
TEST_P(CheckpointRecovery, AFolderThatIsNoneOfCheckpoints) {
  fs::create_symlink("/no/such/disk", folder_.path() / "link");
  run_ranks(kRanks, [&](comm::Communicator& communicator) {
    CarriedNet model;
    const auto engine = start(model.ptr(), config(), communicator).engine;
    const auto says = [&](const char* text) {
      return ThrowsMessage<Error>(HasSubstr(communicator.rank() == 0 ? text : "another rank could not load it"));
    };
    EXPECT_THAT([&] { engine->load_checkpoint(tag(3).string() + "/"); },
                says("is a checkpoint itself, expected the folder above it"));
    EXPECT_THAT([&] { engine->load_checkpoint(dir() + "/link"); }, says("is a symbolic link to /no/such/disk"));
    for (const auto& call : std::vector<std::function<void()>>{[&] { engine->load_checkpoint("s3://bucket/run"); },
                                                               [&] { engine->save_checkpoint("s3://bucket/run"); }}) {
      EXPECT_THAT(call, ThrowsMessage<UsageError>(HasSubstr("found \"s3://bucket/run\"")));
    }
    EXPECT_EQ(engine->global_steps(), 0);
  });
  EXPECT_FALSE(fs::exists("s3:"));
}

TEST_P(CheckpointRecovery, NothingThatIsWhole) {
  for (int64_t step = 1; step <= 3; ++step) fs::remove(tag(step) / "index.json");
  fs::remove(dir() + "/latest");
  EXPECT_EQ(loaded_step(), 0);
  EXPECT_THAT(said_, HasSubstr("no checkpoint in"));
  fs::remove_all(dir());
  EXPECT_EQ(loaded_step(), 0);
  fs::create_directory(dir());
  EXPECT_EQ(loaded_step(), 0);
}

// All that there are are damaged.
TEST_P(CheckpointRecovery, TheLastOneThrowsOnAllRanks) {
  for (int64_t step = 1; step <= 3; ++step) flip(weights_of(step, 0));
  run_ranks(kRanks, [&](comm::Communicator& communicator) {
    CarriedNet model;
    const auto engine = start(model.ptr(), config(), communicator).engine;
    EXPECT_THROW(engine->load_checkpoint(dir()), IoError);
    EXPECT_THAT([&] { engine->save_checkpoint(dir(), "mixture"); },
                ThrowsMessage<UsageError>(HasSubstr("load a checkpoint that is whole")));
  });
  EXPECT_FALSE(fs::exists(dir() + "/mixture"));
}

TEST_P(CheckpointRecovery, AnExplicitTagIsTheOnlyOneTried) {
  const fs::path optimizer = tag(3) / cat("optimizer-00001-of-0000", kRanks, ".safetensors");
  flip(optimizer);
  run_ranks(kRanks, [&](comm::Communicator& communicator) {
    CarriedNet model;
    const auto engine = start(model.ptr(), config(), communicator).engine;
    train_until(*engine, model, 1);
    EXPECT_THAT([&] { engine->load_checkpoint(dir(), "global_step3"); },
                ThrowsMessage<IoError>(AnyOf(AllOf(HasSubstr("optimizer-00001"), HasSubstr("optimizer/exp_avg")),
                                             HasSubstr("another rank"))));
    const auto refuses = [&] {
      EXPECT_THROW(engine->backward(model->loss(rows_of(0, communicator.rank(), kRanks))), UsageError);
      EXPECT_THROW(engine->save_checkpoint(dir(), "mixture"), UsageError);
    };
    refuses();
    // What is not there changes nothing of that, nor does a load of the weights alone.
    EXPECT_THROW(engine->load_checkpoint(dir(), "global_step9"), IoError);
    refuses();
    EXPECT_THROW(engine->load_checkpoint(dir(), "global_step2", {.load_module_only = true}), UsageError);
    EXPECT_THROW(engine->load_checkpoint(dir(), "global_step2", {.load_optimizer_states = false}), UsageError);
    refuses();
    engine->load_checkpoint(dir(), "global_step2");
    EXPECT_EQ(largest_difference(train_until(*engine, model, 3), weights_.at(2)), 0.0);
    engine->save_checkpoint(dir(), "good");
  });
}

// The weights are whole.
TEST_P(CheckpointRecovery, DamageThatIsNotReadDoesNotMatter) {
  flip(tag(3) / cat("optimizer-00001-of-0000", kRanks, ".safetensors"));
  run_ranks(kRanks, [&](comm::Communicator& communicator) {
    CarriedNet model;
    const auto engine = start(model.ptr(), config(), communicator).engine;
    engine->load_checkpoint(dir(), "global_step3", {.load_optimizer_states = false});
    EXPECT_EQ(largest_difference(copy_of(engine->fp32_state_dict()), weights_.at(2)), 0.0);
    train_until(*engine, model, 4);
    // Half of the weights, then all of them.
    EXPECT_THROW(engine->load_checkpoint(dir(), "global_step7", {.load_module_only = true}), IoError);
    engine->load_checkpoint(dir(), "global_step2", {.load_module_only = true});
    EXPECT_EQ(largest_difference(copy_of(engine->fp32_state_dict()), weights_.at(1)), 0.0);
    train_until(*engine, model, 5);
  });
}

TEST_P(CheckpointRecovery, AfterAHalfLoadOfWeightsAloneTheWeightsAreEnough) {
  flip(weights_of(3, 0));
  flip(weights_of(3, 1));
  run_ranks(kRanks, [&](comm::Communicator& communicator) {
    CarriedNet model;
    const auto engine = start(model.ptr(), config(), communicator).engine;
    EXPECT_THROW(engine->load_checkpoint(dir(), "global_step3", {.load_module_only = true}), IoError);
    EXPECT_THROW(engine->backward(model->loss(rows_of(0, communicator.rank(), kRanks))), UsageError);
    engine->load_checkpoint(dir(), "global_step2", {.load_module_only = true});
    EXPECT_EQ(largest_difference(copy_of(engine->fp32_state_dict()), weights_.at(1)), 0.0);
    train_until(*engine, model, 1);
  });
}

// A checkpoint of another model is not passed over: the folder is the wrong one.
TEST_P(CheckpointRecovery, OneThatDoesNotFitIsAnErrorAtOnce) {
  run_ranks(kRanks, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), small_config(GetParam(), 1), communicator).engine;
    EXPECT_THAT([&] { engine->load_checkpoint(dir()); },
                ThrowsMessage<UsageError>(AllOf(HasSubstr("global_step3"), HasSubstr("does not fit the model"))));
    train(*engine, model, 1);  // nothing was changed
  });
}

}  // namespace
}  // namespace ds::engine
