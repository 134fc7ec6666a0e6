// Linear layers on FP8 on a GPU, through at::_scaled_mm, against the same numbers emulated on the CPU.
#include <ATen/record_function.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <cstdlib>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "comm/shared_memory/thread_group.h"
#include "dsengine/errors.h"
#include "fp8/linear_table.h"
#include "ops/device_kernels.h"
#include "tests/engine/small_run.h"
#include "tests/gpu/tested_device.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using ::testing::HasSubstr;

constexpr int kAda = 89;

torch::nn::Sequential layers_of(at::ScalarType type) {
  torch::nn::Sequential model(torch::nn::Linear(32, 48), torch::nn::Tanh(), torch::nn::Linear(48, 16));
  fill(*model);
  model->to(type);
  return model;
}

class GpuFp8 : public ::testing::Test {
 protected:
  // The simulated GPU is what the test says, a real one what it is.
  static void SetUpTestSuite() {
    if (test::device_is_simulated()) ::setenv("DS_SIMULATED_CAPABILITY", "90", 1);
  }

  bool has_fp8() const {
    if (device_.is_cpu()) return false;
    return ops::ops_device_kernels()->compute_capability(device_.index()) >= kAda;
  }
  std::vector<double> losses_on(at::Device device, const ordered_json& config, at::ScalarType type) {
    torch::nn::Sequential model = layers_of(type);
    const auto engine =
        initialize({.model = model.ptr(), .config = config, .communicator = borrowed(*ranks_), .device = device.str()})
            .engine;
    std::vector<double> losses;
    for (int64_t micro = 0; micro < 12; ++micro) {
      const at::Tensor steps = torch::arange(24 * 32, torch::kDouble) * 1.3 + static_cast<double>(17 * micro);
      const at::Tensor x = torch::cos(steps).view({24, 32}).to(type).to(engine->device());
      const at::Tensor loss = (model->forward(x) - x.narrow(1, 0, 16).sin()).to(at::kFloat).pow(2).mean();
      engine->backward(loss);
      engine->step();
      losses.push_back(loss.item<double>());
    }
    return losses;
  }
  static ordered_json config_of(int stage, bool emulate, const ordered_json& more) {
    ordered_json config = small_config(stage, 2);
    config["bf16"] = {{"enabled", true}};
    config["fp8"] = {{"enabled", true}, {"emulate", emulate}, {"amax_history_len", 4}};
    config["fp8"].update(more);
    return config;
  }

  const at::Device device_ = test::tested_device();
  std::shared_ptr<comm::Communicator> ranks_ = comm::ThreadGroup(1).communicator(0);
};

TEST_F(GpuFp8, TrainsAsEmulatedOnTheCpu) {
  const bool on_hardware = has_fp8();
  if (!on_hardware && !device_.is_cpu()) GTEST_SKIP() << "this GPU has no FP8";
  for (const int stage : {0, 2, 3}) {
    for (const ordered_json& more :
         std::vector<ordered_json>{ordered_json::object(), {{"recipe", "current"}}, {{"fp8_wgrad", true}}}) {
      const auto expected = losses_on(at::kCPU, config_of(stage, true, more), at::kBFloat16);
      const auto found = losses_on(device_, config_of(stage, !on_hardware, more), at::kBFloat16);
      for (size_t i = 0; i < expected.size(); ++i) {
        EXPECT_NEAR(found[i], expected[i], 0.05 * (1.0 + expected[i])) << "stage " << stage << ", " << more.dump();
      }
    }
  }
}

struct LayerRun {
  at::Tensor output, input, weight, bias;
};

LayerRun layer_on(at::Device device, fp8::Arithmetic arithmetic, at::ScalarType type, int64_t rows, bool bias) {
  torch::nn::Linear layer(torch::nn::LinearOptions(32, 48).bias(bias));
  fill(*layer);
  layer->to(type);
  layer->to(device);
  const auto scaling =
      std::make_shared<fp8::Scaling>(fp8::ScalingOptions{.weight_gradients = true, .arithmetic = arithmetic},
                                     std::vector<std::string>{"itself"}, device);
  fp8::set_layers(fp8::linears_of(*layer), scaling);
  const auto waves = [&](int64_t columns, double step) {
    return torch::sin(torch::arange(rows * columns, torch::kDouble) * step).view({rows, columns}).to(type).to(device);
  };
  const at::Tensor input = waves(32, 1.3).requires_grad_(true);
  const at::Tensor output = layer->forward(input);
  output.backward(waves(48, 0.7));
  const auto on_host = [](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.detach().to(at::kCPU).to(at::kDouble) : at::Tensor();
  };
  return {on_host(output), on_host(input.grad()), on_host(layer->weight.grad()),
          bias ? on_host(layer->bias.grad()) : at::Tensor()};
}

// How often an operator is called, on any thread.
std::atomic<int> scaled_products;

std::unique_ptr<at::ObserverContext> count_scaled_product(const at::RecordFunction& function) {
  if (std::string_view(function.name()) == "aten::_scaled_mm") ++scaled_products;
  return nullptr;
}

// A training that is a little wrong learns, too: a layer's own numbers, and that it is the hardware that has them.
TEST_F(GpuFp8, ALayerIsTheEmulatedOne) {
  if (!has_fp8()) GTEST_SKIP() << "no GPU that has FP8";
  const at::CallbackHandle handle =
      at::addGlobalCallback(at::RecordFunctionCallback(&count_scaled_product).scopes({at::RecordScope::FUNCTION}));
  for (const at::ScalarType type : {at::kFloat, at::kHalf, at::kBFloat16}) {
    for (const int64_t rows : {1, 24}) {
      for (const bool bias : {false, true}) {
        const LayerRun expected = layer_on(at::kCPU, fp8::Arithmetic::kEmulated, type, rows, bias);
        scaled_products = 0;
        const LayerRun found = layer_on(device_, fp8::Arithmetic::kHardware, type, rows, bias);
        EXPECT_EQ(scaled_products, 3) << "the output, and the gradients of input and weight";
        const auto expect_near = [&](const at::Tensor& has, const at::Tensor& stated, const char* what) {
          ASSERT_EQ(has.defined(), stated.defined()) << what;
          if (!has.defined()) return;
          EXPECT_LT((has - stated).abs().max().item<double>(), 1e-2 * stated.abs().max().item<double>())
              << what << ", " << type << ", " << rows << " rows, bias " << bias;
        };
        expect_near(found.output, expected.output, "output");
        expect_near(found.input, expected.input, "gradient of the input");
        expect_near(found.weight, expected.weight, "gradient of the weight");
        expect_near(found.bias, expected.bias, "gradient of the bias");
      }
    }
  }
  at::removeCallback(handle);
}

// The device judges the steps of the second run, and the host learns of it one step later.
TEST_F(GpuFp8, AStepThatIsSkippedLeavesTheHistoryOfTheCpu) {
  if (device_.is_cpu()) GTEST_SKIP() << "no GPU";
  const auto memory_on = [&](at::Device device) {
    torch::nn::Sequential model = layers_of(at::kBFloat16);
    ordered_json config = config_of(1, /*emulate=*/true, ordered_json::object());
    config["train_batch_size"] = config["train_micro_batch_size_per_gpu"];
    config["gradient_accumulation_steps"] = 1;
    config["non_finite_gradients"] = "skip";
    const auto engine =
        initialize({.model = model.ptr(), .config = config, .communicator = borrowed(*ranks_), .device = device.str()})
            .engine;
    int skipped = 0;
    for (int64_t step = 0; step < 6; ++step) {
      const at::Tensor x = (torch::cos(torch::arange(24 * 32, torch::kDouble)) * static_cast<double>(step + 1))
                               .view({24, 32})
                               .to(at::kBFloat16)
                               .to(engine->device());
      const double factor = step == 3 ? std::numeric_limits<double>::infinity() : 1.0;
      engine->backward(model->forward(x).to(at::kFloat).pow(2).mean() * factor);
      engine->step();
      if (step == 5) skipped = static_cast<int>(engine->skipped_steps());
    }
    EXPECT_EQ(skipped, 1);
    const auto layer = fp8::find_layer(model->ptr<torch::nn::LinearImpl>(0)->weight);
    return layer->scaling.lock()->memory(0)[static_cast<int64_t>(fp8::Kind::kInput)].to(at::kCPU);
  };
  const at::Tensor expected = memory_on(at::kCPU);
  EXPECT_TRUE(torch::equal(memory_on(device_), expected)) << expected;
  EXPECT_TRUE(torch::equal(expected.narrow(0, 0, 4), torch::tensor({2.0F, 3.0F, 5.0F, 6.0F}))) << expected;
}

// Of the simulated GPU, which can be any.
TEST_F(GpuFp8, AnOlderGpuIsRefusedByName) {
  if (!test::device_is_simulated()) GTEST_SKIP() << "a real GPU has the compute capability that it has";
  const auto refusal_of = [&](const char* capability, const ordered_json& more) -> std::string {
    ::setenv("DS_SIMULATED_CAPABILITY", capability, 1);
    try {
      losses_on(device_, config_of(0, false, more), at::kBFloat16);
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "none";
  };
  const ordered_json blocks = {{"granularity", "block"}, {"recipe", "current"}};
  EXPECT_THAT(refusal_of("80", ordered_json::object()), HasSubstr("capability 8.9 or newer, found 8.0 (cuda:0)"));
  EXPECT_THAT(refusal_of("89", blocks), HasSubstr("found 8.9 (cuda:0); use \"tensor\""));
  EXPECT_THAT(refusal_of("100", blocks), HasSubstr("found 10.0"));
  EXPECT_THAT(refusal_of("90", blocks), HasSubstr("multiples of 512"));
  ::setenv("DS_SIMULATED_CAPABILITY", "90", 1);
}

}  // namespace
}  // namespace ds::engine
