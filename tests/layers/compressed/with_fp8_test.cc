// Compressed layers and FP8 layers, which both put kernels in front of LibTorch's: beside each other, not in one model.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "dsengine/errors.h"
#include "dsengine/model_compression.h"
#include "layers/fp8/linear.h"
#include "tests/model/small_run.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using test::run_ranks;
using testing::HasSubstr;

ordered_json four_bits() {
  ordered_json config = small_config(0, 1);
  config["log_level"] = "warning";
  ordered_json& method = config["compression_training"]["weight_quantization"];
  method["shared_parameters"] = {{"enabled", true}, {"schedule_offset", 0}, {"quantize_groups", 32}};
  method["different_groups"]["g"]["params"] = {{"start_bits", 4}, {"target_bits", 4}};
  method["different_groups"]["g"]["modules"] = {"*"};
  return config;
}

// Of two models in a process one is compressed, then one has FP8 layers.
TEST(ModelCompression, AnotherModelBesideHasFp8Layers) {
  torch::nn::Linear compressed(32, 32);
  init_compression(*compressed, four_bits());
  set_compression_step(*compressed, 0);
  torch::nn::Linear on_fp8(32, 32);
  fp8::ScalingOptions options;
  options.recipe = fp8::Recipe::kCurrent;
  options.arithmetic = fp8::Arithmetic::kEmulated;
  const auto scaling = std::make_shared<fp8::Scaling>(options, std::vector<std::string>{"itself"}, c10::kCPU);
  fp8::set_layers(fp8::linears_of(*on_fp8), scaling);

  const at::Tensor half = std::get<0>(compressed->weight.detach().abs().max(1, true)) / 8;
  const at::Tensor q = (compressed->weight.detach() / half).round().clamp(-8, 7) * half;
  const at::Tensor rows = torch::cos(torch::arange(2 * 3 * 32, torch::kFloat)).view({2, 3, 32});
  for (const at::Tensor& values : {rows, rows[0]}) {
    const at::Tensor input = values.clone().requires_grad_(true);
    const at::Tensor output = compressed(input);
    EXPECT_TRUE(torch::allclose(output, torch::matmul(values, q.t()) + compressed->bias));
    output.sum().backward();
    EXPECT_TRUE(torch::allclose(input.grad(), q.sum(0).expand_as(values), 1e-4, 1e-5));  // not that of the weight
    const at::Tensor plain = torch::matmul(values, on_fp8->weight.detach().clone().t()) + on_fp8->bias;
    const at::Tensor found = on_fp8(values);
    EXPECT_TRUE(torch::allclose(found, plain, 0.1, 0.1));
    EXPECT_FALSE(torch::allclose(found, plain, 1e-4, 1e-4)) << "FP8 rounds more than that";
  }
}

TEST(ModelCompression, APreparedModelIsRefusedWithFp8) {
  run_ranks(1, [&](comm::Communicator& communicator) {
    torch::nn::Linear layer(32, 32);
    init_compression(*layer, four_bits());
    ordered_json config = small_config(0, 1);
    config["log_level"] = "warning";
    config["fp8"] = {{"enabled", true}, {"emulate", true}};
    try {
      start(layer.ptr(), config, communicator);
      FAIL() << "expected a ConfigError";
    } catch (const ConfigError& error) {
      EXPECT_THAT(error.what(), HasSubstr("fp8 with compression_training is not available"));
    }
  });
}

}  // namespace
}  // namespace ds::engine
