// What LibTorch's allocators report against what the plan predicts.
#include <gtest/gtest.h>

#include "dsengine/engine.h"
#include "profiling/tensor_memory.h"
#include "tests/model/small_run.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;

constexpr int64_t kCountedWidth = 256;

struct CountedNetImpl : torch::nn::Module {
  CountedNetImpl() {
    for (int i = 0; i < 8; ++i) {
      layers.push_back(register_module(cat("layer", i), torch::nn::Linear(kCountedWidth, kCountedWidth)));
    }
    fill(*this);
  }
  at::Tensor loss(at::Tensor x) {
    x = torch::nn::functional::pad(x, torch::nn::functional::PadFuncOptions({0, kCountedWidth - 6}));
    x = x.to(layers.front()->weight.scalar_type());
    for (auto& layer : layers) x = torch::tanh(layer(x));
    return x.pow(2).mean();
  }
  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(CountedNet);

class CountedMemory : public ::testing::TestWithParam<std::tuple<int, int, const char*>> {};

INSTANTIATE_TEST_SUITE_P(Grid, CountedMemory,
                         ::testing::Combine(::testing::Values(0, 1, 2, 3), ::testing::Values(1, 2, 4),
                                            ::testing::Values("fp32", "bf16")),
                         [](const auto& cell) {
                           return cat("stage", std::get<0>(cell.param), "ranks", std::get<1>(cell.param),
                                      std::get<2>(cell.param));
                         });

TEST_P(CountedMemory, BetweenStepsARankHoldsWhatIsPredicted) {
  const int stage = std::get<0>(GetParam());
  const int world = std::get<1>(GetParam());
  ordered_json config = small_config(stage, 1);
  config["zero_optimization"]["reduce_bucket_size"] = kCountedWidth * (kCountedWidth + 1);
  if (std::string(std::get<2>(GetParam())) == "bf16") config["bf16"]["enabled"] = true;
  test::run_ranks(world, [&](comm::Communicator& communicator) {
    const profiling::TensorMemory memory;
    CountedNet model;
    const auto engine = start(model.ptr(), config, communicator).engine;
    for (int64_t step = 0; step < 3; ++step) {
      engine->backward(model->loss(sample(step, communicator.rank())));
      engine->step();
    }
    engine->synchronize_parameters();
    const double predicted = static_cast<double>(engine->plan().bytes->total());
    EXPECT_NEAR(static_cast<double>(memory.live_bytes()) / predicted, 1.0, 0.02);
  });
}

}  // namespace
}  // namespace ds::engine
