// Pipelines whose stages are on GPUs of their own, joined by NCCL, against plain torch on the CPU.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <barrier>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "core/text.h"
#include "tests/gpu/host_waits.h"
#include "tests/gpu/nccl_ranks.h"
#include "tests/gpu/tested_device.h"
#include "tests/pipeline/pipeline_job.h"
#include "tests/pipeline/split_job.h"
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

struct AxesCell {
  std::string name;
  SplitJob job;
};

// Pipe 2 x tensor 2 with one data-parallel rank and with two.
std::vector<AxesCell> axes_cells() {
  std::vector<AxesCell> cells = {
      {"OneForwardOneBackwardRecomputed", {.stage = 1, .tied = true, .interval = 2, .sequence = true}},
      {"PiecesStage1", {.stage = 1, .depth = 2}},
      {"Data2ZbvStage3", {.data = 2, .stage = 3, .schedule = "zbv", .tied = true, .sequence = true, .depth = 1}},
  };
  for (AxesCell& cell : cells) cell.job.steps = 3;
  cells[1].job.more["pipeline"] = {{"pipe_partitioned", true}, {"grad_partitioned", true}};
  return cells;
}

class GpuAxes : public ::testing::TestWithParam<AxesCell> {};

INSTANTIATE_TEST_SUITE_P(PipeAndTensor, GpuAxes, ::testing::ValuesIn(axes_cells()),
                         [](const auto& cell) { return cell.param.name; });

TEST_P(GpuAxes, TrainAsPlainTorchDoes) {
  const SplitJob& job = GetParam().job;
  if (const std::string why = test::missing_gpus(job.world()); !why.empty()) GTEST_SKIP() << why;
  const Curve wanted = plain_curve(job);
  test::on_gpus(job.world(), [&](comm::Communicator& world, at::Device device) {
    const auto engine = job.start(world, device.str());
    int64_t next = 0;
    for (size_t step = 0; step < wanted.losses.size(); ++step) {
      const at::Tensor loss =
          engine->train_batch([&] { return on_device(text_of(next++, engine->communicator().rank()), device); });
      EXPECT_NEAR(loss.item<double>(), wanted.losses[step], 1e-4) << "step " << step;
    }
    EXPECT_TRUE(engine->joined_operators().empty());
  });
}

// Returns what the hosts of all ranks wait for in `steps` steps whose losses nobody reads, after some that are not
// counted.
test::Waits waits_of_batches(const SplitJob& job, int steps) {
  std::barrier all(job.world());
  test::Waits waits;
  test::on_gpus(job.world(), [&](comm::Communicator& world, at::Device device) {
    const auto engine = job.start(world, device.str());
    const MicroBatch batch = on_device(text_of(0, engine->communicator().rank()), device);
    const auto train = [&](int count) {
      for (int step = 0; step < count; ++step) engine->train_batch([&] { return batch; });
    };
    train(2);
    test::take_waits(all, world.rank() == 0, waits);
    train(steps);
    test::take_waits(all, world.rank() == 0, waits);
  });
  return waits;
}

TEST(GpuAxesWaits, NothingInABatchLetsTheHostWait) {
  if (!test::device_is_simulated()) GTEST_SKIP() << "waits of the host are counted by the simulated GPU";
  struct WaitsCell {
    int data;
    int stage;
    const char* schedule;
  };
  for (const WaitsCell& cell : std::vector<WaitsCell>{{1, 0, "1f1b"}, {2, 2, "zbv"}}) {
    SCOPED_TRACE(cat("data ", cell.data, ", stage ", cell.stage));
    SplitJob job{.data = cell.data, .stage = cell.stage, .schedule = cell.schedule, .tied = true, .depth = 1};
    job.more["bf16"]["enabled"] = true;
    job.more["steps_per_print"] = 1000;
    EXPECT_EQ(test::text_of(waits_of_batches(job, 2)), "");
  }
}

}  // namespace
}  // namespace ds::pipeline
