// Checkpoints of frozen parameters.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <memory>
#include <string>

#include "checkpoint/folder_source.h"
#include "core/check.h"
#include "core/text.h"
#include "tests/model/checkpoint/checkpoint_run.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using test::run_ranks;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

// Frozen weights in 8 bits: what is read is what operators see, and stays so however often it is saved and loaded.
TEST(CheckpointFrozen, InEightBits) {
  const test::ScratchFolder folder;
  const std::string dir = folder.path().string();
  ordered_json config = carried_config(3, 2);
  config["zero_optimization"]["zero_quantized_nontrainable_weights"] = true;
  const auto go = [&](const ordered_json& with, const std::string& from, const std::string& to) {
    run_ranks(2, [&](comm::Communicator& communicator) {
      CarriedNet model;
      if (!from.empty()) forget(*model);
      const auto engine = start(model.ptr(), with, communicator).engine;
      if (!from.empty()) engine->load_checkpoint(dir, from);
      engine->save_checkpoint(dir, to);
    });
  };
  go(carried_config(3, 2), "", "exact");
  go(config, "exact", "rounded");
  go(config, "rounded", "again");
  go(carried_config(3, 2), "again", "plain");
  const auto frozen = [&](const std::string& tag) {
    return checkpoint::open_folder(dir + "/" + tag)->tensor("weights/frozen");
  };
  EXPECT_FALSE(torch::equal(frozen("exact"), frozen("rounded")));
  EXPECT_TRUE(torch::allclose(frozen("exact"), frozen("rounded"), 0.0, 0.01));
  EXPECT_TRUE(torch::allclose(frozen("rounded"), frozen("again"), 1e-6, 1e-7));
  EXPECT_TRUE(torch::equal(frozen("again"), frozen("plain")));
}

// The slices that ranks of a node keep of frozen parameters are of the values before.
TEST(CheckpointFrozen, SecondarySlicesFollow) {
  const test::ScratchFolder folder;
  const std::string dir = folder.path().string();
  ordered_json config = carried_config(3, 4);
  config["zero_optimization"]["zero_hpz_partition_size"] = 2;
  std::map<int, double> losses;
  run_ranks(4, [&](comm::Communicator& communicator) {
    CarriedNet model;
    const auto engine = start(model.ptr(), config, communicator).engine;
    engine->save_checkpoint(dir, "saved");
    const double loss = model->loss(rows_of(0, communicator.rank(), 4)).item<double>();
    if (communicator.rank() == 0) losses[0] = loss;
  });
  run_ranks(4, [&](comm::Communicator& communicator) {
    CarriedNet model;
    forget(*model);
    const auto engine = start(model.ptr(), config, communicator).engine;
    engine->backward(model->loss(rows_of(0, communicator.rank(), 4)));
    engine->step();
    engine->load_checkpoint(dir, "saved");
    const double loss = model->loss(rows_of(0, communicator.rank(), 4)).item<double>();
    if (communicator.rank() == 0) losses[1] = loss;
  });
  EXPECT_EQ(losses[0], losses[1]);
}

TEST(CheckpointFrozen, MayBeLeftOut) {
  for (const int stage : {1, 3}) {
    const test::ScratchFolder folder;
    const std::string dir = folder.path().string();
    run_ranks(2, [&](comm::Communicator& communicator) {
      CarriedNet model;
      const auto engine = start(model.ptr(), carried_config(stage, 2), communicator).engine;
      engine->save_checkpoint(dir, "tag", {.exclude_frozen_parameters = true});
      EXPECT_THAT([&] { engine->load_checkpoint(dir, "tag"); },
                  ThrowsMessage<UsageError>(AllOf(HasSubstr("weights/frozen"), HasSubstr("load_module_strict"))));
      EXPECT_TRUE(engine->load_checkpoint(dir, "tag", {.load_module_strict = false}));
      const State weights = copy_of(engine->fp32_state_dict());
      CarriedNet fresh;
      EXPECT_TRUE(torch::equal(weights.at("frozen"), fresh->frozen));
    });
    EXPECT_FALSE(checkpoint::open_folder(dir + "/tag")->contains("weights/frozen"));
  }
}

struct HollowNet : SmallNetImpl {
  HollowNet() {
    register_parameter("none", torch::empty({0, 3}));
    register_parameter("frozen_none", torch::empty({2, 0}), /*requires_grad=*/false);
    register_buffer("empty_buffer", torch::empty({0}));
  }
};

TEST(CheckpointFrozen, ParametersWithoutElements) {
  const test::ScratchFolder folder;
  const std::string dir = folder.path().string();
  for (const int stage : {0, 2, 3}) {
    run_ranks(2, [&](comm::Communicator& communicator) {
      const auto model = std::make_shared<HollowNet>();
      const auto engine = start(model, small_config(stage, 1), communicator).engine;
      engine->save_checkpoint(dir, cat("stage", stage));
    });
  }
  for (const int stage : {0, 2, 3}) {
    for (const int from : {0, 2, 3}) {
      run_ranks(1, [&](comm::Communicator& communicator) {
        const auto model = std::make_shared<HollowNet>();
        const auto engine = start(model, small_config(stage, 1), communicator).engine;
        EXPECT_TRUE(engine->load_checkpoint(dir, cat("stage", from)));
      });
    }
  }
}

}  // namespace
}  // namespace ds::engine
