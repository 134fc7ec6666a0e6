// Jobs of a few ranks, threads of this process, that train the layered model through engine::initialize.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/check.h"
#include "tests/pipeline/layered_model.h"
#include "tests/support/borrowed.h"
#include "tests/support/thread_ranks.h"

namespace ds::pipeline {

constexpr int kSteps = 6;

inline nlohmann::json config_of(int stages, const std::string& schedule, int zero_stage) {
  return {{"train_micro_batch_size_per_gpu", 2},
          {"gradient_accumulation_steps", 4},
          {"gradient_clipping", 0.5},
          {"log_level", "error"},
          {"optimizer", {{"type", "AdamW"}, {"params", {{"lr", 1e-3}, {"weight_decay", 0.01}}}}},
          {"zero_optimization", {{"stage", zero_stage}, {"stage3_param_persistence_threshold", 20}}},
          {"pipeline", {{"stages", stages}, {"schedule", schedule}}}};
}

// One rank of a job.
struct Rank {
  engine::Engine& engine;
  int world_rank = 0;
  int64_t next = 0;  // micro-batch

  at::Tensor train() {
    return engine.train_batch([this] { return tokens_of(next++, engine.communicator().rank()); });
  }
  // Also where this rank is asked for none of the batch.
  double train_step(int64_t step) {
    next = step * engine.gradient_accumulation_steps();
    return train().item<double>();
  }
};

struct Job {
  int ranks = 2;
  nlohmann::json config;
  bool tied = true;
  PipelineOptions options{.loss = cross_entropy};
  std::function<std::vector<LayerSpec>()> layers;
  // None: the optimizer is the config's.
  std::function<std::shared_ptr<torch::optim::Optimizer>(torch::nn::Module&)> make_optimizer;
};

inline void run(const Job& job, const std::function<void(Rank&)>& body) {
  test::run_ranks(job.ranks, [&](comm::Communicator& world) {
    torch::set_num_threads(1);
    const auto model =
        std::make_shared<PipelineModule>(job.layers ? job.layers() : layers_of(4, job.tied), job.options);
    const auto ranks = test::borrowed(world);
    auto parts = engine::initialize(
        {.model = model, .config = job.config, .make_optimizer = job.make_optimizer, .communicator = ranks});
    Rank rank{*parts.engine, world.rank()};
    body(rank);
  });
}

inline std::vector<double> losses_of(const Job& job, int steps = kSteps) {
  std::vector<double> losses;
  run(job, [&](Rank& rank) {
    for (int step = 0; step < steps; ++step) {
      const double loss = rank.train_step(step);
      if (rank.world_rank == 0) losses.push_back(loss);
    }
  });
  return losses;
}

inline void expect_near(const std::vector<double>& found, const std::vector<double>& wanted, double tolerance) {
  ASSERT_EQ(found.size(), wanted.size());
  for (size_t i = 0; i < wanted.size(); ++i) EXPECT_NEAR(found[i], wanted[i], tolerance) << "step " << i;
}

}  // namespace ds::pipeline
