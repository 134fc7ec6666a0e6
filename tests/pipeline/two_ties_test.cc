// Two weights that stages share, which the first stage uses in another order than the last one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "tests/pipeline/layered_model.h"
#include "tests/support/thread_ranks.h"

namespace ds::pipeline {
namespace {

struct SquareImpl : torch::nn::Module {
  explicit SquareImpl(const std::string& name) {
    weight = register_parameter("weight", torch::zeros({kWidth, kWidth}));
    fill_by_name(*this, name);
  }
  at::Tensor forward(const at::Tensor& x) { return torch::tanh(torch::matmul(x, weight)); }
  at::Tensor weight;
};
TORCH_MODULE(Square);

at::Tensor backwards(SquareImpl& square, const at::Tensor& x) { return torch::matmul(x, square.weight.t()); }

std::map<std::string, at::Tensor> trained(int stages, int zero_stage) {
  std::map<std::string, at::Tensor> weights;
  test::run_ranks(stages, [&](comm::Communicator& world) {
    torch::set_num_threads(1);
    const std::vector<LayerSpec> layers = {
        LayerSpec::tied<TokenEmbedding>("embed", "embed"),
        LayerSpec::tied<Square>("square", "square"),
        LayerSpec::tied_with<Square>("square", backwards, "square"),
        LayerSpec::tied_with<TokenEmbedding>("embed", project, "embed"),
    };
    const nlohmann::json config = {{"train_micro_batch_size_per_gpu", 2},
                                   {"gradient_accumulation_steps", 4},
                                   {"log_level", "error"},
                                   {"optimizer", {{"type", "AdamW"}, {"params", {{"lr", 1e-2}}}}},
                                   {"zero_optimization", {{"stage", zero_stage}}},
                                   {"pipeline", {{"stages", stages}, {"partition", "uniform"}}}};
    const auto model = std::make_shared<PipelineModule>(layers, PipelineOptions{.loss = cross_entropy});
    const std::shared_ptr<comm::Communicator> ranks(&world, [](comm::Communicator*) {});
    const auto engine = engine::initialize({.model = model, .config = config, .communicator = ranks}).engine;
    for (int64_t step = 0; step < 3; ++step) {
      int64_t next = step * 4;
      engine->train_batch([&] { return tokens_of(next++, 0); });
    }
    const auto own = engine->fp32_state_dict();
    if (world.rank() == 0) weights = {own.begin(), own.end()};
  });
  return weights;
}

TEST(TwoTies, AreAddedInOneOrderOnAllStages) {
  for (const int zero_stage : {0, 1, 2, 3}) {
    const auto alone = trained(1, zero_stage);
    const auto both = trained(2, zero_stage);
    ASSERT_EQ(both.size(), 2U);
    for (const auto& [name, values] : both) {
      EXPECT_LT((values - alone.at(name)).abs().max().item<double>(), 2e-5) << name << ", ZeRO stage " << zero_stage;
    }
  }
}

}  // namespace
}  // namespace ds::pipeline
