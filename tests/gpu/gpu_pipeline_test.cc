// Pipelines whose stages are on GPUs of their own, joined by NCCL, against plain torch on the CPU.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <string>
#include <tuple>

#include "core/text.h"
#include "tests/gpu/nccl_ranks.h"
#include "tests/pipeline/pipeline_job.h"

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
    const std::shared_ptr<comm::Communicator> ranks(&world, [](comm::Communicator*) {});
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

}  // namespace
}  // namespace ds::pipeline
