// One save by several ranks: it appears when all of them have written, and leaves nothing when one of them fails.
#include "checkpoint/save_job.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "checkpoint/folder_source.h"
#include "checkpoint/tag_folder.h"
#include "core/check.h"
#include "tests/support/scratch_folder.h"

namespace ds::checkpoint {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

TEST(SaveJob, WaitsForAllTables) {
  const test::ScratchFolder folder;
  const std::string save_dir = folder / "checkpoints";
  const TagSave save = new_save(save_dir, "tag");
  begin_tag(save);
  const at::Tensor values = torch::arange(11, torch::kFloat);
  const auto rank_writes = [&](int rank) {
    SaveJob job({.save = save, .rank = rank, .ranks = 3});
    const int64_t begin = rank * 4;
    const int64_t length = std::min<int64_t>(4, 11 - begin);
    job.open({{"weights/w", {.dtype = at::kFloat, .sizes = {11}}, begin, length}});
    job.write(0, values.narrow(0, begin, length));
    job.finish();
  };
  std::thread late([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(60));
    rank_writes(1);
  });
  rank_writes(2);
  rank_writes(0);
  SaveJob first({.save = save, .rank = 0, .ranks = 3});
  first.publish({}, {}, std::chrono::seconds(30));
  late.join();
  EXPECT_TRUE(torch::equal(open_folder(save_dir + "/tag")->tensor("weights/w"), values));
  EXPECT_TRUE(verify(save_dir + "/tag").empty());
  EXPECT_EQ(read_latest(save_dir), "tag");
}

// What is saved stays, what `latest` names too, and the others go as ever.
TEST(SaveJob, LatestThatCannotBeWrittenIsTold) {
  const test::ScratchFolder folder;
  const std::string save_dir = folder / "checkpoints";
  const at::Tensor values = torch::arange(4, torch::kFloat);
  for (const int64_t step : {1, 2, 3}) {
    const std::string tag = cat("step", step);
    const TagSave save = new_save(save_dir, tag);
    begin_tag(save);
    SaveJob job({.save = save, .rank = 0, .ranks = 1, .keep_last = 1});
    job.open({{"weights/w", {.dtype = at::kFloat, .sizes = {4}}, 0, 4}});
    job.write(0, values);
    job.finish();
    TrainingState state;
    state.global_steps = step;
    state.run = "0123456789abcdef";
    state.keep_last_tag = tag;
    if (step == 1) {
      job.publish(state, {}, std::chrono::seconds(30));
      std::filesystem::create_directory(cat(save_dir, "/latest.", ::getpid(), ".tmp"));  // in the way of a new one
      continue;
    }
    EXPECT_THAT([&] { job.publish(state, {}, std::chrono::seconds(30)); },
                ThrowsMessage<IoError>(AllOf(HasSubstr("it is saved, but"), HasSubstr("latest"))));
  }
  EXPECT_EQ(read_latest(save_dir), "step1");
  EXPECT_TRUE(verify(save_dir + "/step1").empty());
  EXPECT_FALSE(std::filesystem::exists(save_dir + "/step2"));
  EXPECT_TRUE(verify(save_dir + "/step3").empty());
}

TEST(SaveJob, FailuresLeaveNothing) {
  const test::ScratchFolder folder;
  const std::string save_dir = folder / "checkpoints";
  const at::Tensor values = torch::arange(4, torch::kFloat);
  TagSave save;
  const auto begin = [&] {
    save = new_save(save_dir, "tag");
    begin_tag(save);
  };
  const auto rank_zero = [&](int ranks) {
    auto job = std::make_unique<SaveJob>(SaveTarget{.save = save, .rank = 0, .ranks = ranks});
    job->open({{"weights/w", {.dtype = at::kFloat, .sizes = {4}}, 0, 4}});
    job->write(0, values);
    job->finish();
    return job;
  };
  const auto gone = [&] {
    EXPECT_FALSE(fs::exists(tag_path(save_dir, "tag")));
    EXPECT_TRUE(fs::is_empty(save_dir));
    EXPECT_EQ(read_latest(save_dir), std::nullopt);
  };
  begin();
  EXPECT_THAT([&] { rank_zero(2)->publish({}, {}, std::chrono::milliseconds(20)); },
              ThrowsMessage<IoError>(AllOf(HasSubstr("rank 1"), HasSubstr("0.02 s"), HasSubstr("share"))));
  gone();
  begin();
  SaveJob({.save = save, .rank = 1, .ranks = 2}).give_up();
  EXPECT_THAT([&] { rank_zero(2)->publish({}, {}, std::chrono::seconds(30)); },
              ThrowsMessage<IoError>(AllOf(HasSubstr("rank 1"), HasSubstr("could not write its part"))));
  gone();
  begin();
  auto cancelled = rank_zero(2);
  cancelled->cancel();
  EXPECT_THAT([&] { cancelled->publish({}, {}, std::chrono::seconds(30)); },
              ThrowsMessage<IoError>(HasSubstr("given up")));
  gone();
  // Ranks that leave a hole, and ranks that write the same.
  begin();
  {
    SaveJob other({.save = save, .rank = 1, .ranks = 2});
    other.open({{"weights/w", {.dtype = at::kFloat, .sizes = {4}}, 2, 2}});
    other.write(0, values.narrow(0, 2, 2));
    other.finish();
  }
  EXPECT_THAT([&] { rank_zero(2)->publish({}, {}, std::chrono::seconds(30)); },
              ThrowsMessage<IoError>(AllOf(HasSubstr("weights/w"), HasSubstr("twice"))));
  gone();
  // A state that cannot be read back.
  begin();
  TrainingState state;
  state.optimizer = OptimizerState{.type = "AdamW", .step_count = 0, .groups = {{.lr = std::nan("")}}};
  EXPECT_THROW(rank_zero(1)->publish(state, {}, std::chrono::seconds(30)), IoError);
  gone();
}

}  // namespace
}  // namespace ds::checkpoint
