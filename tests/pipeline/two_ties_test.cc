// Two weights that stages share, which the first stage uses in another order than the last one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "tests/pipeline/pipeline_job.h"

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
  Job job{.ranks = stages, .config = config_of(stages, "1f1b", zero_stage)};
  job.config["optimizer"]["params"]["lr"] = 1e-2;
  job.config["pipeline"]["partition"] = "uniform";
  job.layers = [] {
    return std::vector<LayerSpec>{
        LayerSpec::tied<TokenEmbedding>("embed", "embed"),
        LayerSpec::tied<Square>("square", "square"),
        LayerSpec::tied_with<Square>("square", backwards, "square"),
        LayerSpec::tied_with<TokenEmbedding>("embed", project, "embed"),
    };
  };
  std::map<std::string, at::Tensor> weights;
  run(job, [&](Rank& rank) {
    for (int step = 0; step < 3; ++step) rank.train_step(step);
    const auto own = rank.engine.fp32_state_dict();
    if (rank.world_rank == 0) weights = {own.begin(), own.end()};
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

// Other stages' copies would keep the old values.
TEST(TwoTies, AreNotSetOnOneStage) {
  Job job{.ranks = 2, .config = config_of(2, "1f1b", 1)};
  job.config["pipeline"]["partition"] = "uniform";
  job.layers = [] {
    return std::vector<LayerSpec>{LayerSpec::tied<TokenEmbedding>("embed", "embed"), LayerSpec::of<Square>("square"),
                                  LayerSpec::tied_with<TokenEmbedding>("embed", project, "embed")};
  };
  run(job, [&](Rank& rank) {
    rank.train_step(0);
    for (const auto& item : rank.engine.module()->named_parameters()) {
      const at::Tensor& parameter = item.value();
      const at::Tensor values = torch::zeros(parameter.sizes());
      if (item.key().find("embed") == std::string::npos) continue;
      EXPECT_THAT([&] { rank.engine.safe_set_full_fp32_param(parameter, values); },
                  ::testing::ThrowsMessage<UsageError>(::testing::AllOf(
                      ::testing::HasSubstr("safe_set_full_fp32_param()"), ::testing::HasSubstr("is tied"))));
      EXPECT_THAT([&] { rank.engine.safe_set_full_optimizer_state(parameter, values, "exp_avg"); },
                  ::testing::ThrowsMessage<UsageError>(::testing::HasSubstr("is tied")));
    }
  });
}

}  // namespace
}  // namespace ds::pipeline
