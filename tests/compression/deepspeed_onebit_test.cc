// "deepspeed_semantics" against DeepSpeed's own optimizers (deepspeed_onebit.py).
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "compression/compressed_factory.h"
#include "core/text.h"
#include "tests/support/thread_ranks.h"
#include "zero/slice_exchange.h"

namespace ds::compression {
namespace {

using nlohmann::json;

const json& deepspeed() {
  static const json values =
      json::parse(std::ifstream(std::string(DS_SOURCE_DIR) + "/tests/compression/deepspeed_onebit.json"));
  return values;
}

at::Tensor first_weights(int64_t numel) {
  return torch::sin(torch::arange(numel, torch::kDouble) * 0.7).mul(0.4).to(torch::kFloat);
}

at::Tensor gradient(int64_t numel, int rank, int64_t step) {
  const double phase = 1.9 * rank + 0.61 * static_cast<double>(step);
  return torch::sin(torch::arange(numel, torch::kDouble) * 0.37 + phase).mul(0.1).to(torch::kFloat);
}

std::unique_ptr<CompressedOptimizer> make(const std::string& type, const json& settings, comm::Communicator& ranks) {
  optimizers::OptimizerOptions options;
  options.type = type;
  options.groups = {{.lr = settings["lr"],
                     .weight_decay = settings["weight_decay"],
                     .beta1 = settings["betas"][0],
                     .beta2 = settings["betas"][1],
                     .eps = settings["eps"]}};
  engine::config::OptimizerParams& compressed = options.values;
  compressed.freeze_step = settings.value("freeze_step", compressed.freeze_step);
  compressed.var_freeze_step = settings.value("var_freeze_step", compressed.var_freeze_step);
  compressed.var_update_scaler = settings.value("var_update_scaler", compressed.var_update_scaler);
  compressed.local_step_scaler = settings.value("local_step_scaler", compressed.local_step_scaler);
  compressed.local_step_clipper = settings.value("local_step_clipper", compressed.local_step_clipper);
  compressed.deepspeed_semantics = true;
  return make_compressed_optimizer(options, ranks);
}

class DeepSpeedOneBit : public ::testing::TestWithParam<std::string> {};

TEST_P(DeepSpeedOneBit, GivesTheSameWeights) {
  const json& expected = deepspeed()["cases"][GetParam()];
  const int64_t numel = deepspeed()["elements"];
  const int world = static_cast<int>(expected["ranks"].size());
  test::run_ranks(world, [&](comm::Communicator& ranks) {
    const auto optimizer = make(GetParam(), expected["settings"], ranks);
    const std::vector<ParameterInfo> infos = {{"weights", {numel}, numel}};
    const at::Tensor master = first_weights(numel);
    const at::Tensor weights = master.clone();
    optimizer->add_slice({.master = master,
                          .segments = {{0, 0, 0, numel}},
                          .bucket_segments = {{0, 0, 0, numel}},
                          .parameters = &infos,
                          .exchange = zero::make_whole_exchange()});
    int compared = 0;
    for (int64_t step = 1; step <= 40; ++step) {
      at::Tensor own = gradient(numel, ranks.rank(), step);
      if (!optimizer->wants_local_gradients()) {
        own = (gradient(numel, 0, step) + gradient(numel, 1, step)) / 2;
      }
      optimizer->begin_step();
      optimizer->update_into(0, own, 1.0, weights);
      const json& at_step = expected["ranks"][static_cast<size_t>(ranks.rank())];
      if (!at_step.contains(std::to_string(step))) continue;
      ++compared;
      const std::vector<float> values = at_step[std::to_string(step)];
      const double difference = (weights - torch::tensor(values)).abs().max().item<double>();
      EXPECT_LT(difference, 2e-6) << "step " << step;
    }
    EXPECT_EQ(compared, 7);
  });
}

INSTANTIATE_TEST_SUITE_P(Optimizers, DeepSpeedOneBit, ::testing::Values("OneBitAdam", "OneBitLamb", "ZeroOneAdam"));

}  // namespace
}  // namespace ds::compression
