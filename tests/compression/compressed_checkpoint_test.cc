// Checkpoints of compressed optimizers keep their errors, and what ranks have stepped by themselves.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "tests/model/checkpoint/checkpoint_run.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using test::run_ranks;

constexpr int64_t kSaved = 11;  // 0/1 Adam: between two meetings
constexpr int64_t kEnd = 25;

struct SavedJob {
  const char* type;
  int stage;
  int world;
  bool asynchronous = false;

  ordered_json config(int ranks) const {
    ordered_json config = carried_config(stage, ranks);
    ordered_json params = {{"lr", 0.02}, {"weight_decay", 0.1}};
    if (std::string(type) == "ZeroOneAdam") {
      params["var_freeze_step"] = 6;
      params["var_update_scaler"] = 2;
      params["local_step_scaler"] = 2;
      params["local_step_clipper"] = 4;
    } else {
      params["freeze_step"] = 6;
    }
    config["optimizer"] = {{"type", type}, {"params", params}};
    return config;
  }
};

std::string name_of_saved(const ::testing::TestParamInfo<SavedJob>& info) {
  const SavedJob& job = info.param;
  return cat(job.type, "Stage", job.stage, "Ranks", job.world, job.asynchronous ? "Asynchronous" : "");
}

class CompressedCheckpoint : public ::testing::TestWithParam<SavedJob> {};

TEST_P(CompressedCheckpoint, GoesOnBitByBitWithAsManyRanks) {
  const SavedJob& job = GetParam();
  const test::ScratchFolder folder;
  State end;
  std::vector<State> own(static_cast<size_t>(job.world));  // the model of each rank
  run_ranks(job.world, [&](comm::Communicator& communicator) {
    CarriedNet model;
    const auto engine = start(model.ptr(), job.config(job.world), communicator).engine;
    train_until(*engine, model, kSaved);
    SaveOptions options;
    options.asynchronous = job.asynchronous;
    engine->save_checkpoint(folder.path().string(), "middle", options);
    const State last = train_until(*engine, model, kEnd);
    engine->wait_for_checkpoint();
    if (communicator.rank() == 0) end = last;
    own[static_cast<size_t>(communicator.rank())] = parameters_of(*model);
  });
  run_ranks(job.world, [&](comm::Communicator& communicator) {
    CarriedNet model;
    const auto engine = start(model.ptr(), job.config(job.world), communicator).engine;
    train_until(*engine, model, 9);  // what this leaves in errors and averages must go
    engine->load_checkpoint(folder.path().string());
    EXPECT_EQ(engine->global_steps(), kSaved);
    EXPECT_EQ(largest_difference(train_until(*engine, model, kEnd), end), 0.0);
    EXPECT_EQ(largest_difference(parameters_of(*model), own[static_cast<size_t>(communicator.rank())]), 0.0);
  });
}

TEST_P(CompressedCheckpoint, GoesOnWithOtherRanksFromTheSameWeights) {
  const SavedJob& job = GetParam();
  const test::ScratchFolder folder;
  State saved;
  run_ranks(job.world, [&](comm::Communicator& communicator) {
    CarriedNet model;
    const auto engine = start(model.ptr(), job.config(job.world), communicator).engine;
    const State middle = train_until(*engine, model, kSaved);
    if (communicator.rank() == 0) saved = middle;
    engine->save_checkpoint(folder.path().string(), "middle");
  });
  for (const int world : {1, 4}) {
    std::vector<State> ends(static_cast<size_t>(world));
    run_ranks(world, [&](comm::Communicator& communicator) {
      CarriedNet model;
      const auto engine = start(model.ptr(), job.config(world), communicator).engine;
      engine->load_checkpoint(folder.path().string());
      EXPECT_EQ(largest_difference(copy_of(engine->fp32_state_dict()), saved), 0.0);
      const double before = model->loss(rows_of(kSaved, 0, 1)).item<double>();
      ends[static_cast<size_t>(communicator.rank())] = train_until(*engine, model, 30);
      EXPECT_LT(model->loss(rows_of(kSaved, 0, 1)).item<double>(), before);
    });
    for (const State& end : ends) EXPECT_EQ(largest_difference(end, ends[0]), 0.0);
  }
}

INSTANTIATE_TEST_SUITE_P(Runs, CompressedCheckpoint,
                         ::testing::Values(SavedJob{"OneBitAdam", 0, 2}, SavedJob{"OneBitAdam", 1, 3},
                                           SavedJob{"OneBitAdam", 2, 2}, SavedJob{"OneBitAdam", 1, 2, true},
                                           SavedJob{"OneBitLamb", 0, 3}, SavedJob{"OneBitLamb", 2, 2},
                                           SavedJob{"ZeroOneAdam", 0, 2}, SavedJob{"ZeroOneAdam", 0, 3},
                                           SavedJob{"ZeroOneAdam", 0, 2, true}),
                         name_of_saved);

// Weights alone: what ranks have stepped by themselves since they last met was on top of the weights that have gone.
TEST(CompressedCheckpoint, WeightsAloneLeaveNothingOfOwnSteps) {
  const test::ScratchFolder folder;
  const std::string dir = folder.path().string();
  run_ranks(2, [&](comm::Communicator& communicator) {
    CarriedNet model;
    const auto engine = start(model.ptr(), SavedJob{"ZeroOneAdam", 0, 2}.config(2), communicator).engine;
    engine->save_checkpoint(dir, "start");
    train_until(*engine, model, kSaved);
    engine->save_checkpoint(dir, "middle");
    engine->load_checkpoint(dir, "start", {.load_module_only = true});
    engine->save_checkpoint(dir, "again");
  });
  const auto largest_step = [&](const char* tag) {
    const auto source = checkpoint::open_folder(dir + "/" + tag);
    double largest = -1;
    for (const auto& [path, info] : source->tensors()) {
      if (path.find("stepped") == std::string::npos || info.numel() == 0) continue;
      largest = std::max(largest, source->tensor(path).abs().max().item<double>());
    }
    return largest;
  };
  EXPECT_GT(largest_step("middle"), 0);
  EXPECT_EQ(largest_step("again"), 0);
}

TEST(CompressedCheckpoint, AdamsStatesGoOnInOneBitAdam) {
  const test::ScratchFolder folder;
  run_ranks(2, [&](comm::Communicator& communicator) {
    CarriedNet model;
    ordered_json config = carried_config(1, 2);
    const auto adam = start(model.ptr(), config, communicator).engine;
    train_until(*adam, model, 8);
    adam->save_checkpoint(folder.path().string(), "dense");
    CarriedNet other;
    const auto compressed = start(other.ptr(), SavedJob{"OneBitAdam", 1, 2}.config(2), communicator).engine;
    compressed->load_checkpoint(folder.path().string());
    EXPECT_EQ(compressed->global_steps(), 8);
    const double before = other->loss(rows_of(8, 0, 1)).item<double>();
    train_until(*compressed, other, 20);
    EXPECT_LT(other->loss(rows_of(8, 0, 1)).item<double>(), before);
  });
}

}  // namespace
}  // namespace ds::engine
