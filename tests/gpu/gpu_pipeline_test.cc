// Pipelines whose stages are on GPUs of their own, joined by NCCL, against plain torch on the CPU.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <tuple>

#include "core/text.h"
#include "tests/gpu/nccl_ranks.h"
#include "tests/pipeline/pipeline_job.h"
#include "tests/support/borrowed.h"

namespace ds::pipeline {
namespace {

// Schedule, stages, data ranks, ZeRO stage.
using Cell = std::tuple<std::string, int, int, int>;

class GpuPipeline : public ::testing::TestWithParam<Cell> {};

INSTANTIATE_TEST_SUITE_P(Schedules, GpuPipeline,
                         ::testing::Combine(::testing::Values("gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2", "zbv",
                                                              "dualpipev"),
                                            ::testing::Values(2, 3), ::testing::Values(1), ::testing::Values(0, 1)),
                         [](const auto& cell) {
                           return cat(std::get<0>(cell.param), "Stages", std::get<1>(cell.param), "Zero",
                                      std::get<3>(cell.param));
                         });
INSTANTIATE_TEST_SUITE_P(Groups, GpuPipeline,
                         ::testing::Combine(::testing::Values("1f1b", "zbv"), ::testing::Values(2),
                                            ::testing::Values(2), ::testing::Values(1, 2, 3)),
                         [](const auto& cell) {
                           return cat(std::get<0>(cell.param), "Zero", std::get<3>(cell.param));
                         });

MicroBatch on_device(MicroBatch batch, at::Device device) {
  for (at::Tensor& tensor : batch.inputs) tensor = tensor.to(device);
  for (at::Tensor& tensor : batch.labels) tensor = tensor.to(device);
  return batch;
}

TEST_P(GpuPipeline, TrainsAsPlainTorchDoes) {
  const auto& [schedule, stages, data_ranks, zero_stage] = GetParam();
  const Training job{.depth = 6, .tied = true, .steps = kSteps, .data_ranks = data_ranks};
  const Curve wanted = train_plainly(job);
  test::on_gpus(stages * data_ranks, [&](comm::Communicator& world, at::Device device) {
    const auto ranks = test::borrowed(world);
    const auto model =
        std::make_shared<PipelineModule>(layers_of(job.depth, job.tied), PipelineOptions{.loss = cross_entropy});
    const auto engine = engine::initialize({.model = model,
                                            .config = config_of(stages, schedule, zero_stage),
                                            .communicator = ranks,
                                            .device = device.str()})
                            .engine;
    int64_t next = 0;
    for (int step = 0; step < kSteps; ++step) {
      const at::Tensor loss =
          engine->train_batch([&] { return on_device(tokens_of(next++, engine->communicator().rank()), device); });
      next = (step + 1) * engine->gradient_accumulation_steps();
      EXPECT_NEAR(loss.item<double>(), wanted.losses[static_cast<size_t>(step)], 1e-4) << "step " << step;
    }
    for (const auto& [name, value] : engine->module_state_dict()) {
      EXPECT_LT((value.cpu() - wanted.parameters.at(name)).abs().max().item<double>(), 1e-4) << name;
    }
  });
}

// Two stages of which one has other work for the host than the other. The second step is not finite: all ranks look
// into it together, and skip it.
void expect_a_skipped_step(const nlohmann::json& config, int depth, const std::function<void(engine::Engine&)>& apart) {
  test::on_gpus(2, [&](comm::Communicator& world, at::Device device) {
    const auto ranks = test::borrowed(world);
    const auto factor = std::make_shared<double>(1.0);
    const auto loss = [factor](const at::Tensor& logits, const at::Tensor& labels) {
      return cross_entropy(logits, labels) * *factor;
    };
    const auto model = std::make_shared<PipelineModule>(layers_of(depth, /*tied=*/true), PipelineOptions{.loss = loss});
    const auto engine =
        engine::initialize({.model = model, .config = config, .communicator = ranks, .device = device.str()}).engine;
    int64_t next = 0;
    for (int step = 0; step < 4; ++step) {
      *factor = step == 1 ? std::numeric_limits<double>::infinity() : 1.0;
      engine->train_batch([&] { return on_device(tokens_of(next++, 0), device); });
      next = (step + 1) * engine->gradient_accumulation_steps();
      if (step == 0) apart(*engine);
    }
    EXPECT_EQ(engine->skipped_steps(), 1);
    for (const auto& [name, value] : engine->module_state_dict())
      EXPECT_TRUE(value.isfinite().all().item<bool>()) << name;
  });
}

TEST(GpuPipelineSkips, WhereOneStageHasFrozenAParameter) {
  nlohmann::json config = config_of(2, "1f1b", 1);
  config["non_finite_gradients"] = "skip";
  expect_a_skipped_step(config, 4, [](engine::Engine& engine) {
    if (engine.global_rank() == 1) engine.module()->parameters().front().set_requires_grad(false);
  });
}

TEST(GpuPipelineSkips, WhereOneStageHasNoGradientsOfItsOwnOnTheHost) {
  nlohmann::json config = config_of(2, "1f1b", 1);
  config["non_finite_gradients"] = "skip";
  config["zero_optimization"]["offload_optimizer"] = {{"device", "cpu"}};
  expect_a_skipped_step(config, 0, [](engine::Engine&) {});  // the embedding, and its tied copy
}

}  // namespace
}  // namespace ds::pipeline
