// Every schedule, on every number of stages, with every ZeRO stage, trains as plain torch in one process does.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <tuple>
#include <vector>

#include "tests/pipeline/layered_model.h"
#include "tests/support/borrowed.h"
#include "tests/support/grid.h"
#include "tests/support/thread_ranks.h"

namespace ds::pipeline {
namespace {

nlohmann::json config_of(const Training& job, int stages, const std::string& schedule, int zero_stage) {
  return {{"train_micro_batch_size_per_gpu", 2},
          {"gradient_accumulation_steps", job.micro_batches},
          {"gradient_clipping", job.clip},
          {"log_level", "error"},
          {"optimizer", {{"type", "AdamW"}, {"params", {{"lr", job.lr}, {"weight_decay", 0.01}}}}},
          {"zero_optimization", {{"stage", zero_stage}, {"stage3_param_persistence_threshold", 20}}},
          {"pipeline", {{"stages", stages}, {"schedule", schedule}}}};
}

struct RankCurve : Curve {
  bool first = false;
  bool last = false;
};

// Trains on stages x data_ranks threads; what each rank saw, by rank.
std::vector<RankCurve> train(const Training& job, int stages, const nlohmann::json& config) {
  std::vector<RankCurve> curves(static_cast<size_t>(stages * job.data_ranks));
  test::run_ranks(stages * job.data_ranks, [&](comm::Communicator& world) {
    torch::set_num_threads(1);
    const auto model =
        std::make_shared<PipelineModule>(layers_of(job.depth, job.tied), PipelineOptions{.loss = cross_entropy});
    const auto ranks = test::borrowed(world);
    auto parts = engine::initialize({.model = model, .config = config, .communicator = ranks});
    engine::Engine& engine = *parts.engine;
    RankCurve& curve = curves[static_cast<size_t>(world.rank())];
    curve.first = engine.is_first_stage();
    curve.last = engine.is_last_stage();
    const int data_rank = engine.communicator().rank();
    int64_t next = 0;
    for (int step = 0; step < job.steps; ++step) {
      next = step * job.micro_batches;
      const at::Tensor loss = engine.train_batch([&] { return tokens_of(next++, data_rank); });
      curve.losses.push_back(loss.item<double>());
      curve.norms.push_back(*engine.get_global_grad_norm());
    }
    for (auto& [name, value] : engine.module_state_dict()) curve.parameters[name] = value.clone();
  });
  return curves;
}

// What plain torch trains, and how far its norms are from its own with the micro-batches added up in another order: the
// curvature of some steps makes more of rounding than others, and more on some processors than on others.
struct Reference : Curve {
  double rounding = 0;  // largest relative difference of a norm
};

Reference reference_of(Training job) {
  Reference reference{train_plainly(job)};
  job.reversed = true;
  const Curve other = train_plainly(job);
  for (size_t i = 0; i < other.norms.size(); ++i) {
    reference.rounding = std::max(reference.rounding, std::abs(other.norms[i] / reference.norms[i] - 1));
  }
  return reference;
}

void expect_equal(const RankCurve& found, const Reference& wanted) {
  ASSERT_EQ(found.losses.size(), wanted.losses.size());
  ASSERT_LT(wanted.rounding, 1e-4);
  const double tolerance = 2e-5 + 4 * wanted.rounding;
  for (size_t i = 0; i < wanted.losses.size(); ++i) {
    ASSERT_NEAR(found.losses[i], wanted.losses[i], 5e-6) << "step " << i;
    ASSERT_NEAR(found.norms[i], wanted.norms[i], tolerance * wanted.norms[i]) << "step " << i;
  }
  ASSERT_FALSE(found.parameters.empty());
  for (const auto& [name, value] : found.parameters) {
    ASSERT_TRUE(wanted.parameters.contains(name)) << name;
    EXPECT_LE((value - wanted.parameters.at(name)).abs().max().item<double>(), 2e-5) << name;
  }
}

using Cell = std::tuple<std::string, int, int, int, bool>;  // schedule, stages, ZeRO stage, data ranks, tied

class PipelineTraining : public testing::TestWithParam<Cell> {};

TEST_P(PipelineTraining, EqualsPlainTorch) {
  const auto& [schedule, stages, zero_stage, data_ranks, tied] = GetParam();
  const Training job{.tied = tied, .data_ranks = data_ranks};
  static std::map<std::pair<bool, int>, Reference> plain;  // one for many cells
  const auto [found, is_new] = plain.try_emplace({tied, data_ranks});
  if (is_new) found->second = reference_of(job);
  const Reference& wanted = found->second;
  for (const RankCurve& curve : train(job, stages, config_of(job, stages, schedule, zero_stage))) {
    expect_equal(curve, wanted);
  }
}

std::string name_of_cell(const testing::TestParamInfo<Cell>& info) {
  const auto& [schedule, stages, zero_stage, data_ranks, tied] = info.param;
  return schedule + "_Stages" + std::to_string(stages) + "_Zero" + std::to_string(zero_stage) + "_Data" +
         std::to_string(data_ranks) + (tied ? "_Tied" : "");
}

// 336 cells. The sample of 28 has every schedule with every ZeRO stage, and every other two settings together.
std::vector<Cell> cells() {
  const std::vector<std::string> schedules{"gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2", "zbv", "dualpipev"};
  return test::grid_sample(2, schedules, std::vector<int>{2, 3, 4}, std::vector<int>{0, 1, 2, 3},
                           std::vector<int>{1, 2}, std::vector<bool>{false, true});
}

INSTANTIATE_TEST_SUITE_P(Grid, PipelineTraining, testing::ValuesIn(cells()), name_of_cell);

}  // namespace
}  // namespace ds::pipeline
