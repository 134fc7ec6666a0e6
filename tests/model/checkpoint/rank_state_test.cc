// SaveOptions::rank_state: tensors that each rank gives to a checkpoint and gets back.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>

#include "checkpoint/tag_folder.h"
#include "core/check.h"
#include "core/text.h"
#include "tests/model/checkpoint/checkpoint_run.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using test::run_ranks;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

using Tensors = std::map<std::string, at::Tensor>;

// Types, shapes and layouts that differ; rank 1 has one more.
Tensors tensors_of(int rank) {
  const auto number = static_cast<double>(rank);
  Tensors tensors = {{"hidden/0", torch::arange(12.0).view({3, 4}).t() + number},
                     {"steps", torch::tensor(int64_t{40} + rank)},
                     {"field", torch::full({2, 2}, 1e-300 * (number + 1), torch::kDouble)},
                     {"half", torch::full({5}, number + 0.5, torch::kHalf)},
                     {"done", torch::arange(7) > 3 + rank},
                     {"none yet", torch::empty({0, 4})}};
  if (rank == 1) tensors["of rank 1"] = torch::ones({3}, torch::requires_grad()).expand({2, 3});
  return tensors;
}

void expect_equal(const Tensors& found, const Tensors& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (const auto& [name, values] : expected) {
    ASSERT_TRUE(found.contains(name)) << name;
    EXPECT_EQ(found.at(name).scalar_type(), values.scalar_type()) << name;
    EXPECT_FALSE(found.at(name).requires_grad()) << name;
    EXPECT_TRUE(torch::equal(found.at(name), values)) << name;
  }
}

TEST(RankState, ComesBackToEachRank) {
  for (const bool asynchronous : {false, true}) {
    const test::ScratchFolder folder;
    const std::string dir = folder.path().string();
    run_ranks(2, [&](comm::Communicator& communicator) {
      CarriedNet model;
      const auto engine = start(model.ptr(), carried_config(2, 2), communicator).engine;
      one_step(*engine, model);
      Tensors given = tensors_of(communicator.rank());
      engine->save_checkpoint(dir, "one", {.asynchronous = asynchronous, .keep_last = 2, .rank_state = given});
      const torch::NoGradGuard no_grad;
      given.at("hidden/0").fill_(-1);  // what a save has taken is that of the call
      given.at("half").fill_(-1);
      engine->save_checkpoint(dir, "two", {.asynchronous = asynchronous, .rank_state = {}});
      engine->wait_for_checkpoint();

      CarriedNet other;
      const auto fresh = start(other.ptr(), carried_config(3, 2), communicator).engine;
      expect_equal(fresh->load_checkpoint(dir, "one").rank_state, tensors_of(communicator.rank()));
      EXPECT_TRUE(fresh->load_checkpoint(dir, "one", {.load_module_only = true}).rank_state.empty());
      EXPECT_TRUE(fresh->load_checkpoint(dir, "one", {.load_rank_state = false}).rank_state.empty());
      EXPECT_TRUE(fresh->load_checkpoint(dir).rank_state.empty()) << "the second one has none";
    });
    EXPECT_TRUE(checkpoint::verify(dir + "/one").empty());
  }
}

TEST(RankState, IsNotGivenToAnotherNumberOfRanks) {
  const test::ScratchFolder folder;
  const std::string dir = folder.path().string();
  run_ranks(2, [&](comm::Communicator& communicator) {
    CarriedNet model;
    const auto engine = start(model.ptr(), carried_config(1, 2), communicator).engine;
    one_step(*engine, model);
    engine->save_checkpoint(dir, "tag", {.rank_state = tensors_of(communicator.rank())});
  });
  run_ranks(1, [&](comm::Communicator& communicator) {
    CarriedNet model;
    const auto engine = start(model.ptr(), carried_config(1, 1), communicator).engine;
    const State before = copy_of(engine->fp32_state_dict());
    EXPECT_THAT([&] { engine->load_checkpoint(dir, "tag"); },
                ThrowsMessage<UsageError>(AllOf(HasSubstr("rank_state was saved by 2 ranks"),
                                                HasSubstr("as many as here: 1 rank"), HasSubstr("load_rank_state"))));
    EXPECT_EQ(largest_difference(copy_of(engine->fp32_state_dict()), before), 0.0) << "nothing was loaded";
    const LoadedCheckpoint loaded = engine->load_checkpoint(dir, "tag", {.load_rank_state = false});
    EXPECT_EQ(engine->global_steps(), 1);
    EXPECT_TRUE(loaded.rank_state.empty());
    const auto source = checkpoint::open(loaded.path);
    for (const int rank : {0, 1}) {
      EXPECT_TRUE(
          torch::equal(source->tensor(checkpoint::rank_state_path(rank, "hidden/0")), tensors_of(rank).at("hidden/0")));
    }
  });
}

TEST(RankState, WhatACheckpointCannotHoldIsNamedBeforeAnythingIsWritten) {
  const test::ScratchFolder folder;
  const std::string dir = folder.path().string();
  run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), small_config(1, 1), communicator).engine;
    const Tensors wrong = {{"complex", torch::zeros({2}, torch::kComplexFloat)},
                           {"undefined", at::Tensor()},
                           {"", torch::zeros({1})},
                           {"sparse", torch::eye(3).to_sparse()},
                           {"meta", torch::empty({2}, torch::kMeta)}};
    for (const auto& [name, values] : wrong) {
      const Tensors given = communicator.rank() == 1 ? Tensors{{name, values}} : Tensors();
      const auto save = [&] { engine->save_checkpoint(dir, "tag", {.rank_state = given}); };
      if (communicator.rank() == 1) {
        EXPECT_THAT(save, ThrowsMessage<UsageError>(HasSubstr(cat("rank_state: \"", name, "\" of rank 1"))));
      } else {
        EXPECT_THAT(save, ThrowsMessage<IoError>(HasSubstr("rank 1 could not")));
      }
    }
    communicator.barrier();
    EXPECT_FALSE(std::filesystem::exists(checkpoint::tag_path(dir, "tag")));
  });
}

}  // namespace
}  // namespace ds::engine
