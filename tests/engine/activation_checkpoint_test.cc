// Checkpointed regions under the engine: the same training as without them, in every stage.
#include "dsengine/activation_checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <vector>

#include "config/plan/plan.h"
#include "core/check.h"
#include "tests/model/small_run.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using test::run_ranks;
using testing::AllOf;
using testing::HasSubstr;

constexpr int kRegionLayers = 4;

// Layers with a residual, the weight of the first one used again as the head, one region inside another.
struct RegionNet : torch::nn::Module {
  explicit RegionNet(bool with_regions) : regions(with_regions) {
    for (int i = 0; i < kRegionLayers; ++i) {
      layers.push_back(register_module("layer" + std::to_string(i), torch::nn::Linear(6, 6)));
      norms.push_back(
          register_module("norm" + std::to_string(i), torch::nn::LayerNorm(torch::nn::LayerNormOptions({6}))));
    }
    fill(*this);
  }
  at::Tensor block(const at::Tensor& x, size_t i) {
    const auto inner = [layer = layers[i]](const at::Tensor& t) { return torch::tanh(layer->forward(t)); };
    const at::Tensor normed = norms[i]->forward(x);
    return x + (regions && i == 1 ? recompute::checkpoint(inner, normed) : inner(normed));
  }
  at::Tensor loss(const at::Tensor& input) {
    at::Tensor x = input;
    for (size_t i = 0; i < kRegionLayers; ++i) {
      x = regions ? recompute::checkpoint([this, i](const at::Tensor& t) { return block(t, i); }, x) : block(x, i);
    }
    return torch::linear(x, layers[0]->weight).to(torch::kFloat).pow(2).mean();
  }

  bool regions;
  std::vector<std::shared_ptr<torch::nn::LinearImpl>> layers;
  std::vector<std::shared_ptr<torch::nn::LayerNormImpl>> norms;
};

struct RegionRun {
  std::vector<double> losses;
  State weights;
};

RegionRun train_regions(const ordered_json& config, comm::Communicator& communicator, bool regions) {
  const auto model = std::make_shared<RegionNet>(regions);
  const auto engine = start(model, config, communicator).engine;
  RegionRun run;
  for (int64_t micro = 0; micro < 4 * engine->gradient_accumulation_steps(); ++micro) {
    const at::Tensor x = sample(micro, communicator.rank()).to(model->layers[0]->weight.scalar_type());
    const at::Tensor loss = model->loss(x);
    engine->backward(loss);
    engine->step();
    run.losses.push_back(loss.item<double>());
  }
  run.weights = copy_of(engine->fp32_state_dict());
  return run;
}

void expect_same_training(const ordered_json& config) {
  run_ranks(2, [&](comm::Communicator& communicator) {
    const RegionRun plain = train_regions(config, communicator, false);
    const RegionRun regions = train_regions(config, communicator, true);
    EXPECT_EQ(regions.losses, plain.losses);
    EXPECT_EQ(largest_difference(regions.weights, plain.weights), 0.0);
    EXPECT_NE(plain.losses.front(), plain.losses.back());
  });
}

TEST(EngineActivationCheckpoint, EveryStageTrainsTheSame) {
  for (const int stage : {0, 1, 2, 3}) {
    for (const int accumulation : {1, 2}) {
      SCOPED_TRACE(cat("stage ", stage, ", accumulation ", accumulation));
      expect_same_training(small_config(stage, accumulation));
    }
  }
}

TEST(EngineActivationCheckpoint, Bfloat16AndAutocastTrainTheSame) {
  for (const int stage : {0, 2, 3}) {
    SCOPED_TRACE(cat("stage ", stage));
    ordered_json half = small_config(stage, 2);
    half["bf16"] = {{"enabled", true}};
    expect_same_training(half);
  }
}

TEST(EngineActivationCheckpoint, AutocastIsThatOfForward) {
  ordered_json config = small_config(2, 1);
  config["torch_autocast"] = {{"enabled", true}};
  run_ranks(2, [&](comm::Communicator& communicator) {
    const RegionRun plain = train_regions(config, communicator, false);
    const RegionRun regions = train_regions(config, communicator, true);
    ASSERT_EQ(regions.losses.size(), plain.losses.size());
    EXPECT_EQ(regions.losses.front(), plain.losses.front());
    for (size_t i = 0; i < plain.losses.size(); ++i) EXPECT_NEAR(regions.losses[i], plain.losses[i], 2e-2) << i;
  });
}

TEST(EngineActivationCheckpoint, TheSectionConfiguresTheThread) {
  ordered_json config = small_config(1, 1);
  config["steps_per_print"] = 4;
  config["activation_checkpointing"] = {{"profile", true}, {"cpu_checkpointing", true}, {"number_checkpoints", 8}};
  run_ranks(2, [&](comm::Communicator& communicator) {
    train_regions(config, communicator, true);
    EXPECT_TRUE(recompute::checkpoint_options().profile);
    EXPECT_TRUE(recompute::checkpoint_options().cpu_checkpointing);
    EXPECT_EQ(recompute::checkpoint_options().number_checkpoints, 8);
    // Rank 0 has printed, and so taken, them in its last step. The inner region counts where it builds a graph.
    const recompute::CheckpointStatistics left = recompute::take_checkpoint_statistics();
    EXPECT_EQ(left.regions, communicator.rank() == 0 ? 0 : 4 * (kRegionLayers + 1));
    EXPECT_EQ(left.recomputations, communicator.rank() == 0 ? 0 : 4 * (kRegionLayers + 1));
  });
  config["activation_checkpointing"]["number_checkpoints"] = 0;
  run_ranks(1, [&](comm::Communicator& communicator) {
    EXPECT_THAT([&] { start(std::make_shared<RegionNet>(true), config, communicator); },
                testing::ThrowsMessage<ConfigError>(HasSubstr("activation_checkpointing.number_checkpoints")));
  });
}

TEST(EngineActivationCheckpoint, ThePlanSaysWhatTheKeysDo) {
  const auto table = [](const ordered_json& section) {
    const ordered_json config = {{"train_batch_size", 2}, {"activation_checkpointing", section}};
    return to_table(make_plan(config::parse(config, {.dp_world_size = 2}), {.world_size = 2, .dp = 2}));
  };
  EXPECT_THAT(table(ordered_json::object()), testing::Not(HasSubstr("checkpoint")));
  EXPECT_THAT(table({{"partition_activations", true},
                     {"contiguous_memory_optimization", true},
                     {"number_checkpoints", 4},
                     {"synchronize_checkpoint_boundary", true},
                     {"profile", true}}),
              AllOf(HasSubstr("partition_activations"), HasSubstr("tensor_parallel_group"), HasSubstr("no effect"),
                    HasSubstr("contiguous_memory_optimization"), HasSubstr("synchronize_checkpoint_boundary"),
                    HasSubstr("checkpoint profile")));
  EXPECT_THAT(table({{"cpu_checkpointing", true}}), HasSubstr("no effect where the device is the CPU"));
}

// What is said of contiguous_memory_optimization: one warning, one line of the plan.
TEST(EngineActivationCheckpoint, WarningAndPlanSayTheSameOfContiguousMemory) {
  const auto said = [](ordered_json section) {
    section["contiguous_memory_optimization"] = true;
    const ordered_json config = {{"train_batch_size", 2}, {"activation_checkpointing", section}};
    const config::DsConfig parsed = config::parse(config, {.dp_world_size = 2});
    std::string text = to_table(make_plan(parsed, {.world_size = 2, .dp = 2}));
    for (const std::string& warning : parsed.warnings) text += "\n" + warning;
    return text;
  };
  using testing::Not;
  EXPECT_THAT(said(ordered_json::object()),
              AllOf(HasSubstr("without them there are none"),
                    HasSubstr("activation_checkpointing.contiguous_memory_optimization: no effect"),
                    Not(HasSubstr("number_checkpoints"))));
  EXPECT_THAT(said({{"cpu_checkpointing", true}}),
              AllOf(HasSubstr("needs activation_checkpointing.number_checkpoints"),
                    HasSubstr("contiguous_memory_optimization: needs number_checkpoints"),
                    Not(HasSubstr("preallocated slots"))));
  EXPECT_THAT(said({{"cpu_checkpointing", true}, {"number_checkpoints", 4}}),
              AllOf(HasSubstr("preallocated slots"), Not(HasSubstr("contiguous_memory_optimization: "))));
  EXPECT_THAT(said({{"partition_activations", true}, {"number_checkpoints", 4}}),
              AllOf(HasSubstr("no effect by itself"), Not(HasSubstr("contiguous_memory_optimization: "))));
}

}  // namespace
}  // namespace ds::engine
