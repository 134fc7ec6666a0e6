// Shards inside groups of ranks: mics_shard_size (copies of the model state), zero_hpz_partition_size (a secondary copy
// of the parameters).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "config/plan/plan.h"
#include "core/check.h"
#include "dsengine/engine.h"
#include "tests/model/small_run.h"
#include "tests/support/thread_ranks.h"
#include "zero/memory_model.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr double kHybridTolerance = 2e-5;
constexpr int kHybridRanks = 4;
constexpr int kHybridSteps = 4;

// Trains and compares with torch; returns what rank 0 sent in a step after the first, and its optimizer states.
struct HybridRun {
  int64_t sent = 0;
  int64_t optimizer_bytes = 0;
};

HybridRun expect_torch(const ordered_json& config, int accumulation, bool whole_modules = true) {
  const State expected =
      TorchRun{.world = kHybridRanks, .accumulation = accumulation, .steps = kHybridSteps}.train_adamw();
  HybridRun run;
  test::run_ranks(kHybridRanks, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), config, communicator).engine;
    train(*engine, model, 1);
    engine->reset_comm_counters();
    for (int64_t micro = accumulation; micro < kHybridSteps * accumulation; ++micro) {
      engine->backward(model->loss(sample(micro, communicator.rank())));
      engine->step();
    }
    engine->synchronize_parameters();
    const int64_t sent = engine->comm_bytes_sent();
    const zero::ModelStateBytes predicted = engine->plan().bytes.value();
    const Engine::ModelStateBytes measured = engine->model_state_bytes();
    EXPECT_EQ(measured.optimizer, predicted.optimizer);
    if (whole_modules) EXPECT_EQ(measured.gradients, predicted.gradients);
    EXPECT_EQ(measured.parameters, predicted.parameters);
    EXPECT_LT(largest_difference(copy_of(engine->fp32_state_dict()), expected), kHybridTolerance);
    if (communicator.rank() != 0) return;
    run.sent = sent / (kHybridSteps - 1);
    run.optimizer_bytes = measured.optimizer;
  });
  return run;
}

// Buckets end at modules: gradients then arrive bucket by bucket, which is what the prediction of their memory assumes.
ordered_json hybrid_config(int stage, int accumulation) {
  ordered_json config = small_config(stage, accumulation);
  config["zero_optimization"]["reduce_bucket_size"] = 96;
  return config;
}

struct HybridCase {
  int stage;
  int accumulation;
};

class HybridShards : public ::testing::TestWithParam<HybridCase> {};

INSTANTIATE_TEST_SUITE_P(Grid, HybridShards,
                         ::testing::Values(HybridCase{1, 1}, HybridCase{1, 2}, HybridCase{2, 1}, HybridCase{2, 2},
                                           HybridCase{3, 1}, HybridCase{3, 2}),
                         [](const auto& cell) {
                           return cat("stage", cell.param.stage, "gas", cell.param.accumulation);
                         });

TEST_P(HybridShards, MicsAgreesWithTorchAndHoldsAsMuchAsItsGroupNeeds) {
  const auto [stage, accumulation] = GetParam();
  ordered_json config = hybrid_config(stage, accumulation);
  const HybridRun all = expect_torch(config, accumulation);
  config["zero_optimization"]["mics_shard_size"] = 2;
  const HybridRun halves = expect_torch(config, accumulation);
  config["zero_optimization"]["mics_shard_size"] = 1;
  const HybridRun whole = expect_torch(config, accumulation);
  // Padding makes slices of small buckets a little larger.
  EXPECT_NEAR(static_cast<double>(halves.optimizer_bytes) / static_cast<double>(all.optimizer_bytes), 2.0, 0.5);
  EXPECT_NEAR(static_cast<double>(whole.optimizer_bytes) / static_cast<double>(all.optimizer_bytes), 4.0, 1.2);
}

TEST_P(HybridShards, MicsKeepsRanksEqualUnderBfloat16) {
  const auto [stage, accumulation] = GetParam();
  ordered_json config = small_config(stage, accumulation);
  config["zero_optimization"]["mics_shard_size"] = 2;
  config["bf16"]["enabled"] = true;
  test::run_ranks(kHybridRanks, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), config, communicator).engine;
    train(*engine, model, 3);
    for (const auto& [name, tensor] : engine->module_state_dict()) {
      const at::Tensor first = tensor.to(torch::kFloat).contiguous();
      communicator.broadcast(first, 0).wait();
      EXPECT_TRUE(first.equal(tensor.to(torch::kFloat))) << name << " on rank " << communicator.rank();
    }
  });
}

TEST(HybridShards, SecondarySlicesAgreeWithTorchAndKeepTrafficInTheNode) {
  for (const int accumulation : {1, 2}) {
    ordered_json config = small_config(3, accumulation);  // a bucket for every parameter
    const HybridRun plain = expect_torch(config, accumulation, /*whole_modules=*/false);
    config["zero_optimization"]["zero_hpz_partition_size"] = 2;
    const HybridRun secondary = expect_torch(config, accumulation, /*whole_modules=*/false);
    // An all-gather sends 3/4 of a bucket over all ranks, 1/2 inside the node.
    EXPECT_LT(secondary.sent, plain.sent);
  }
}

TEST(HybridShards, ThePredictionOfAStepBoundsWhatIsGathered) {
  for (const int64_t reuse : {0, 60, 1000000}) {
    for (const int64_t prefetch : {0, 40, 1000000}) {
      for (const int64_t live : {90, 130, 1000000}) {
        ordered_json config = small_config(3, 1);
        ordered_json& zero = config["zero_optimization"];
        zero["stage3_max_reuse_distance"] = reuse;
        zero["stage3_prefetch_bucket_size"] = prefetch;
        zero["stage3_max_live_parameters"] = live;
        test::run_ranks(2, [&](comm::Communicator& communicator) {
          SmallNet model;
          const auto engine = start(model.ptr(), config, communicator).engine;
          train(*engine, model, 3);
          const int64_t measured = engine->model_state_bytes().gathered;
          const int64_t predicted = engine->plan().step_bytes.gathered;
          EXPECT_LE(measured, predicted) << config["zero_optimization"].dump();
          EXPECT_LE(measured, std::max<int64_t>(live, 2 * 96) * 4);
          EXPECT_GT(measured, 0);
        });
      }
    }
  }
}

TEST(HybridShards, FrozenParametersLiveInCopiesToo) {
  for (const char* key : {"mics_shard_size", "zero_hpz_partition_size"}) {
    ordered_json config = small_config(3, 1);
    config["zero_optimization"][key] = 2;
    test::run_ranks(kHybridRanks, [&](comm::Communicator& communicator) {
      SmallNet model;
      SmallNet reference;
      model->first->weight.set_requires_grad(false);
      const at::Tensor before = model->first->weight.clone();
      const auto engine = start(model.ptr(), config, communicator).engine;
      const at::Tensor x = sample(0, communicator.rank());
      for (int pass = 0; pass < 2; ++pass) EXPECT_TRUE(model->forward(x).equal(reference->forward(x))) << key;
      train(*engine, model, 2);
      EXPECT_TRUE(copy_of(engine->fp32_state_dict()).at("first.weight").equal(before)) << key;
    });
  }
}

TEST(HybridShards, SizesThatDoNotDivideTheRanksAreErrors) {
  const auto refuses = [](const ordered_json& zero, const char* text) {
    ordered_json config = small_config(3, 1);
    config["zero_optimization"].update(zero);
    EXPECT_THAT(
        [&] {
          make_plan(config::parse(config, {.dp_world_size = 4, .auto_values = {}}), {4, 4});
        },
        ThrowsMessage<ConfigError>(HasSubstr(text)));
  };
  refuses({{"mics_shard_size", 3}}, "zero_optimization.mics_shard_size: expected a divisor of 4");
  refuses({{"zero_hpz_partition_size", 3}}, "zero_optimization.zero_hpz_partition_size: expected a divisor of 4");
  refuses({{"mics_shard_size", 2}, {"zero_hpz_partition_size", 2}}, "excludes zero_hpz_partition_size");
}

}  // namespace
}  // namespace ds::engine
