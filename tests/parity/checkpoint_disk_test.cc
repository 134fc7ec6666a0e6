// Disks that are full or may not be written: a save fails and says why, and what was saved before is whole.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <torch/torch.h>

#include <chrono>
#include <csignal>
#include <cstdint>
#include <filesystem>
#include <string>

#include "checkpoint/folder_source.h"
#include "checkpoint/tag_folder.h"
#include "core/check.h"
#include "core/text.h"
#include "dsengine/engine.h"
#include "tests/model/small_run.h"
#include "tests/support/process_ranks.h"
#include "tests/support/small_disk.h"
#include "tests/support/thread_ranks.h"
#include "tests/support/thrown.h"

namespace ds::engine {
namespace {

namespace fs = std::filesystem;
using test::run_ranks;
using ::testing::AnyOf;
using ::testing::HasSubstr;

constexpr int kDiskRanks = 2;

// 12 MB of weights and states.
struct MegaNetImpl : torch::nn::Module {
  MegaNetImpl() { weight = register_parameter("weight", torch::full({1 << 20}, 0.5)); }
  at::Tensor loss() { return (weight * 1.5).sum() * 1e-3; }
  at::Tensor weight;
};
TORCH_MODULE(MegaNet);

State mega_step(Engine& engine, MegaNet& model) {
  engine.backward(model->loss());
  engine.step();
  return copy_of(engine.fp32_state_dict());
}

// Saves, waits, and returns the message of the failure.
std::string failure_of(Engine& engine, const std::string& dir, const std::string& tag, bool asynchronous) {
  return test::thrown_by<IoError>(
      [&] {
        engine.save_checkpoint(dir, tag, {.asynchronous = asynchronous});
        engine.wait_for_checkpoint();
      },
      "");
}

TEST(CheckpointDisk, AFullOne) {
  const test::SmallDisk disk(32);
  if (!disk.mounted()) {
    GTEST_SKIP() << "this user may not mount file systems; AFileThatMayNotGrow has the limit that it may set";
  }
  const std::string dir = disk.path() + "/checkpoints";
  for (const bool asynchronous : {false, true}) {
    run_ranks(kDiskRanks, [&](comm::Communicator& communicator) {
      MegaNet model;
      const auto engine = start(model.ptr(), small_config(2, 1), communicator).engine;
      mega_step(*engine, model);
      const State saved = copy_of(engine->fp32_state_dict());
      ASSERT_EQ(failure_of(*engine, dir, "good", asynchronous), "");
      mega_step(*engine, model);
      ASSERT_EQ(failure_of(*engine, dir, "second", asynchronous), "");
      for (int turn = 0; turn < 2; ++turn) {
        mega_step(*engine, model);
        EXPECT_THAT(failure_of(*engine, dir, "third", asynchronous),
                    AnyOf(HasSubstr("No space left"), HasSubstr("its message says why")));
        // Nor is there room for another under a name that is there.
        EXPECT_NE(failure_of(*engine, dir, "good", asynchronous), "");
      }
      communicator.barrier();
      EXPECT_FALSE(fs::exists(checkpoint::tag_path(dir, "third")));
      EXPECT_TRUE(checkpoint::incomplete_paths(dir, "third").empty());
      EXPECT_EQ(checkpoint::read_latest(dir), "second");
      const State end = mega_step(*engine, model);
      EXPECT_GT(largest_difference(end, saved), 0.0);
      engine->load_checkpoint(dir, "good");
      EXPECT_EQ(largest_difference(copy_of(engine->fp32_state_dict()), saved), 0.0);
      communicator.barrier();
      if (communicator.rank() == 0) fs::remove_all(checkpoint::tag_path(dir, "second"));
      communicator.barrier();
      EXPECT_EQ(failure_of(*engine, dir, "third", asynchronous), "");
    });
    EXPECT_TRUE(checkpoint::verify(dir + "/good").empty());
    EXPECT_TRUE(checkpoint::verify(dir + "/third").empty());
    fs::remove_all(dir);
  }
}

TEST(CheckpointDisk, OneThatMayNotBeWritten) {
  const test::SmallDisk disk(64);
  if (!disk.mounted()) GTEST_SKIP() << "this user may not mount file systems, nor make one read-only";
  const std::string dir = disk.path() + "/checkpoints";
  for (const bool read_only : {false, true}) {
    if (read_only) ASSERT_TRUE(disk.make_read_only(true));
    run_ranks(kDiskRanks, [&](comm::Communicator& communicator) {
      MegaNet model;
      const auto engine = start(model.ptr(), small_config(3, 1), communicator).engine;
      mega_step(*engine, model);
      if (!read_only) {
        engine->save_checkpoint(dir, "good");
        return;
      }
      for (const bool asynchronous : {false, true}) {
        for (const char* tag : {"good", "new"}) {
          EXPECT_THAT(failure_of(*engine, dir, tag, asynchronous),
                      AnyOf(HasSubstr("Read-only file system"), HasSubstr("its message says why")));
        }
      }
      const State now = copy_of(engine->fp32_state_dict());
      mega_step(*engine, model);
      EXPECT_EQ(engine->load_checkpoint(dir).tag, "good");
      EXPECT_EQ(largest_difference(copy_of(engine->fp32_state_dict()), now), 0.0);
    });
  }
  EXPECT_TRUE(disk.make_read_only(false));
  EXPECT_TRUE(checkpoint::verify(dir + "/good").empty());
}

void set_file_limit(rlim_t bytes) {
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &limit), 0);
  limit.rlim_cur = bytes;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
}

// On one rank alone, first or last.
DS_PROCESS_TEST(CheckpointDisk, AFileThatMayNotGrow, 2) {
  MegaNet model;
  const auto engine =
      initialize({.model = model.ptr(),
                  .config = small_config(1, 1),
                  .init_method = cat("file://", ranks.folder(), "/meeting?rank=", ranks.rank(), "&world_size=2"),
                  .timeout = std::chrono::seconds(30)})
          .engine;
  const std::string dir = ranks.folder() + "/checkpoints";
  mega_step(*engine, model);
  const State saved = copy_of(engine->fp32_state_dict());
  ASSERT_EQ(failure_of(*engine, dir, "good", false), "");
  for (const int bad : {0, 1}) {
    for (const bool asynchronous : {false, true}) {
      mega_step(*engine, model);
      if (ranks.rank() == bad) set_file_limit(1 << 20);
      const std::string message = failure_of(*engine, dir, "good", asynchronous);
      if (ranks.rank() == bad) set_file_limit(RLIM_INFINITY);
      EXPECT_THAT(message, HasSubstr(ranks.rank() == bad ? "File too large" : cat("rank ", bad)));
      engine->communicator().barrier();
      EXPECT_TRUE(checkpoint::incomplete_paths(dir, "good").empty());
      EXPECT_TRUE(checkpoint::verify(dir + "/good").empty());
    }
  }
  engine->load_checkpoint(dir);
  EXPECT_EQ(largest_difference(copy_of(engine->fp32_state_dict()), saved), 0.0);
  mega_step(*engine, model);
  EXPECT_EQ(failure_of(*engine, dir, "next", true), "");
}

}  // namespace
}  // namespace ds::engine
