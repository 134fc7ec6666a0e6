// Pipelines whose layers are split over a tensor axis, against plain torch in one process.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "tests/pipeline/split_job.h"
#include "tests/support/grid.h"

namespace ds::pipeline {
namespace {

Curve plainly(const SplitJob& job) {
  const auto module = job.make();
  module->build({});
  torch::optim::AdamW optimizer(module->parameters(), torch::optim::AdamWOptions(2e-3).weight_decay(0.01));
  Curve curve;
  for (int64_t step = 0; step < job.steps; ++step) {
    optimizer.zero_grad();
    double sum = 0;
    for (int64_t micro = step * kBatchesOfAStep; micro < (step + 1) * kBatchesOfAStep; ++micro) {
      for (int rank = 0; rank < job.data; ++rank) {
        const MicroBatch batch = text_of(micro, rank);
        const at::Tensor loss =
            cross_entropy(module->forward(batch.inputs[0]), batch.labels[0]) / (kBatchesOfAStep * job.data);
        loss.backward();
        sum += loss.item<double>();
      }
    }
    curve.losses.push_back(sum);
    curve.norms.push_back(torch::nn::utils::clip_grad_norm_(module->parameters(), 0.5));
    optimizer.step();
  }
  return curve;
}

// Returns what rank 0 reports; all ranks report the same losses.
Curve train_split(const SplitJob& job) {
  Curve curve;
  std::vector<std::vector<double>> losses(static_cast<size_t>(job.world()));
  run_split(job, [&](engine::Engine& engine, comm::Communicator& world) {
    EXPECT_EQ(engine.mp_world_size(), job.tensor);
    EXPECT_EQ(engine.dp_world_size(), job.data);
    EXPECT_EQ(engine.pipe_parallel_size(), job.pipe);
    std::vector<double>& own = losses[static_cast<size_t>(world.rank())];
    for (int64_t step = 0; step < job.steps; ++step) {
      int64_t next = step * kBatchesOfAStep;
      own.push_back(engine.train_batch([&] { return text_of(next++, engine.communicator().rank()); }).item<double>());
      if (world.rank() == 0) curve.norms.push_back(engine.get_global_grad_norm().value_or(-1));
    }
    EXPECT_TRUE(engine.joined_operators().empty());
  });
  for (const auto& of_rank : losses) EXPECT_EQ(of_rank, losses[0]);
  curve.losses = losses[0];
  return curve;
}

void expect_same(const Curve& found, const Curve& wanted, double losses, double norms) {
  ASSERT_EQ(found.losses.size(), wanted.losses.size());
  for (size_t i = 0; i < wanted.losses.size(); ++i) {
    EXPECT_NEAR(found.losses[i], wanted.losses[i], losses) << "loss of step " << i;
    EXPECT_NEAR(found.norms[i], wanted.norms[i], norms * std::max(1.0, wanted.norms[i])) << "norm of step " << i;
  }
}

TEST(PipelineTensor, TrainsAsOneProcess) {
  std::map<std::pair<int, bool>, Curve> wanted;
  for (const int data : {1, 2}) {
    for (const bool tied : {false, true}) wanted[{data, tied}] = plainly({.data = data, .tied = tied});
  }
  ASSERT_LT((wanted[{1, false}].losses.back()), (wanted[{1, false}].losses.front()));
  const std::vector<std::string> schedules = {"gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2", "zbv", "dualpipev"};
  for (const auto& [schedule, stage, data, tied, interval, sequence] :
       test::grid_sample(2, schedules, std::vector{0, 1, 2, 3}, std::vector{1, 2}, std::vector{false, true},
                         std::vector{0, 2}, std::vector{false, true})) {
    SCOPED_TRACE(testing::Message() << schedule << ", stage " << stage << ", data " << data << ", tied " << tied
                                    << ", recomputed " << interval << ", sequence " << sequence);
    const SplitJob job{
        .data = data, .stage = stage, .schedule = schedule, .tied = tied, .interval = interval, .sequence = sequence};
    expect_same(train_split(job), wanted.at({data, tied}), 5e-6, 2e-5);
  }
}

TEST(PipelineTensor, Float64AgreesToTheLastDigits) {
  for (const bool tied : {false, true}) {
    for (const bool sequence : {false, true}) {
      const SplitJob job{.schedule = tied ? "zbv" : "1f1b", .tied = tied, .sequence = sequence, .dtype = at::kDouble};
      expect_same(train_split(job), plainly(job), 1e-11, 1e-11);
    }
  }
}

TEST(PipelineTensor, FourStagesAndFourRanksOfAnAxisTrainAsOneProcess) {
  const Curve wanted = plainly({.tied = true});
  expect_same(train_split({.pipe = 4, .stage = 1, .tied = true}), wanted, 5e-6, 2e-5);
  expect_same(train_split({.tensor = 4, .stage = 3, .schedule = "zb_h1", .tied = true}), wanted, 5e-6, 2e-5);
}

}  // namespace
}  // namespace ds::pipeline
