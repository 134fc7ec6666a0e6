// The same small program on the engine and on plain LibTorch, with what it does to its model in the middle.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <vector>

#include "tests/model/small_run.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {

// Rounding of one sum in two orders.
constexpr double kSameResult = 1e-6;

inline std::string stage_name(const ::testing::TestParamInfo<int>& cell) {
  return "Stage" + std::to_string(cell.param);
}

struct PortedRun {
  int world = 2;
  int steps = 6;
  // Before this step the program changes its model.
  int changes_at = 3;
  std::function<void(SmallNet&)> change = {};
};

struct PortedResult {
  std::vector<double> losses;  // of the global batch
  State weights;
};

inline double mean_over(comm::Communicator& ranks, double value) {
  const at::Tensor sum = torch::full({1}, value, torch::kDouble);
  if (ranks.size() > 1) ranks.all_reduce(sum, comm::ReduceOp::kSum, "metric of the test").wait();
  return sum.item<double>() / ranks.size();
}

inline PortedResult run_plainly(const PortedRun& run) {
  SmallNet model;
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(0.02).weight_decay(0.1));
  PortedResult result;
  for (int step = 0; step < run.steps; ++step) {
    if (step == run.changes_at && run.change) run.change(model);
    optimizer.zero_grad();
    double loss = 0;
    for (int rank = 0; rank < run.world; ++rank) {
      const at::Tensor part = model->loss(sample(step, rank)) / run.world;
      part.backward();
      loss += part.item<double>();
    }
    optimizer.step();
    result.losses.push_back(loss);
  }
  result.weights = parameters_of(*model);
  return result;
}

// `change` of the engine's program, which may need the engine; else that of the run.
inline PortedResult run_on_engine(const PortedRun& run, const nlohmann::ordered_json& config,
                                  const std::function<void(Engine&, SmallNet&)>& change = {}) {
  PortedResult result;
  test::run_ranks(run.world, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), config, communicator).engine;
    std::vector<double> losses;
    for (int step = 0; step < run.steps; ++step) {
      if (step == run.changes_at && change) change(*engine, model);
      if (step == run.changes_at && !change && run.change) run.change(model);
      const at::Tensor loss = model->loss(sample(step, communicator.rank()));
      engine->backward(loss);
      engine->step();
      losses.push_back(mean_over(communicator, loss.item<double>()));
    }
    const State weights = copy_of(engine->fp32_state_dict());
    if (communicator.rank() == 0) result = {.losses = losses, .weights = weights};
  });
  return result;
}

inline void expect_same(const PortedResult& found, const PortedResult& expected, double tolerance = kSameResult) {
  ASSERT_EQ(found.losses.size(), expected.losses.size());
  for (size_t i = 0; i < expected.losses.size(); ++i) {
    EXPECT_NEAR(found.losses[i], expected.losses[i], tolerance * std::max(1.0, expected.losses[i])) << "step " << i;
  }
  EXPECT_LT(largest_difference(found.weights, expected.weights), tolerance * 10);
}

inline nlohmann::ordered_json with_bf16(nlohmann::ordered_json config) {
  config["bf16"] = {{"enabled", true}};
  return config;
}

}  // namespace ds::engine
