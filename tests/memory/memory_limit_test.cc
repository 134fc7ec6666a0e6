// A model whose float32 states take 3 GB trains on four ranks of which each may hold what its slices and the gathered
// parameters need, and nothing near the whole: the kernel refuses more (RLIMIT_DATA).
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <vector>

#include "comm/backends/factory.h"
#include "config/plan/plan.h"
#include "dsengine/engine.h"
#include "tests/memory/large_net.h"
#include "tests/support/process_ranks.h"

namespace ds::engine {
namespace {

using testing::ProcessRank;

constexpr int64_t kRanks = 4;
constexpr int64_t kWidth = 3072;
constexpr int64_t kDepth = 20;
constexpr int64_t kParameters = kDepth * kWidth * kWidth;
constexpr int64_t kLive = 2 * kWidth * kWidth;  // stage3_max_live_parameters
// Activations, the gradient that autograd has just made and its copy, transport, holes in malloc's heap.
constexpr int64_t kAllowance = int64_t{128} << 20;

nlohmann::ordered_json large_config(int stage) {
  return {{"train_micro_batch_size_per_gpu", 2},
          {"optimizer", {{"type", "AdamW"}, {"params", {{"lr", 1e-5}}}}},
          {"zero_optimization",
           {{"stage", stage},
            {"stage3_max_live_parameters", kLive},
            {"stage3_max_reuse_distance", kLive},
            {"stage3_prefetch_bucket_size", kWidth * kWidth}}}};
}

// What a rank of stage 3 is predicted to hold, in all and without the slack.
int64_t predicted_bytes() {
  const auto config = config::parse(large_config(3), {.dp_world_size = kRanks, .auto_values = {}});
  const Plan plan = make_plan(config, {.world_size = kRanks, .dp = kRanks}, {.parameters = kParameters});
  return plan.bytes->total() + kLive * 4;
}

// Sets the limit of this process; returns its communicator.
std::shared_ptr<comm::Communicator> join_limited(const ProcessRank& ranks) {
  at::set_num_threads(1);
  const auto communicator = comm::make_communicator(ranks.meet(), at::kCPU);
  at::mm(at::ones({64, 64}), at::ones({64, 64}));  // libraries set themselves up
  limit_further_memory(predicted_bytes() + kAllowance);
  return communicator;
}

// The step is small beside the 3072 terms of each sum: the loss falls on every rank, whatever the start values are.
std::vector<double> losses_of_large_net(Engine& engine, LargeNet& model, int rank) {
  std::vector<double> losses;
  const at::Tensor x = large_input(kWidth, rank);
  for (int step = 0; step < 3; ++step) {
    losses.push_back(engine.backward(model->loss(x)).item<double>());
    engine.step();
  }
  return losses;
}

DS_PROCESS_TEST(MemoryLimit, Stage3TrainsAModelOfThreeGigabytes, kRanks, std::chrono::seconds(240)) {
  static_assert(kParameters * 16 > 3'000'000'000);
  EXPECT_LT(predicted_bytes() + kAllowance, kParameters * 16 / 2);  // nothing near the whole
  const auto communicator = join_limited(ranks);
  zero::Init init(communicator, {.max_live = kWidth * kWidth});
  LargeNet model(kWidth, kDepth);
  const auto engine = initialize({.model = model.ptr(), .config = large_config(3), .init = &init}).engine;
  const std::vector<double> losses = losses_of_large_net(*engine, model, ranks.rank());
  EXPECT_LT(losses.back(), losses.front());
  // Between steps: 16 bytes a parameter, less gradients that are not there, over the ranks.
  const Engine::ModelStateBytes bytes = engine->model_state_bytes();
  const double states = static_cast<double>(bytes.parameters + bytes.optimizer);
  EXPECT_LE(bytes.gathered, kLive * 4);
  EXPECT_GT(bytes.gathered, 0);
  EXPECT_NEAR(states / (12.0 * kParameters / kRanks), 1.0, 0.02);
}

DS_PROCESS_TEST(MemoryLimit, Stage0DoesNotFitUnderTheSameLimit, kRanks, std::chrono::seconds(240)) {
  const auto communicator = join_limited(ranks);
  EXPECT_THROW(
      {
        LargeNet model(kWidth, kDepth);
        const auto engine =
            initialize({.model = model.ptr(), .config = large_config(0), .communicator = communicator}).engine;
        losses_of_large_net(*engine, model, ranks.rank());
      },
      std::exception);
}

}  // namespace
}  // namespace ds::engine
