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
#include "core/text.h"
#include "dsengine/errors.h"
#include "layers/fp8/linear.h"
#include "layers/fp8/quantize.h"
#include "layers/fp8/quantize_measured.h"
#include "ops/device_kernels.h"
#include "tests/gpu/tested_device.h"
#include "tests/model/small_run.h"

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
    return device_functions<ops::OpsDeviceKernels>()->compute_capability(device_.index()) >= kAda;
  }
  std::string why_no_fp8() const {
    if (device_.is_cpu()) return "DS_TEST_DEVICE=cpu: the CPU has no FP8";
    return cat("FP8 needs compute capability 8.9 or newer, found ",
               device_functions<ops::OpsDeviceKernels>()->compute_capability(device_.index()) / 10.0);
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
  if (!on_hardware && !device_.is_cpu()) GTEST_SKIP() << why_no_fp8();
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
  if (!has_fp8()) GTEST_SKIP() << why_no_fp8();
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
  if (device_.is_cpu()) GTEST_SKIP() << "DS_TEST_DEVICE=cpu: the run on the CPU is what a device is compared with";
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

// Numbers of very different sizes, zeros of both signs and, where asked for, one that is not finite.
at::Tensor spread_values(int64_t rows, int64_t columns, at::ScalarType type, double bad) {
  const at::Tensor steps = torch::arange(rows * columns, torch::kDouble);
  at::Tensor values = (torch::sin(steps * 1.7) * torch::exp(torch::cos(steps * 0.3) * 9.0)).view({rows, columns});
  values[0].slice(0, 0, columns, 5).fill_(-0.0);
  if (rows > 1) values[rows - 1].fill_(0.0);
  if (bad != 0) values[0][1] = bad;
  return values.to(type);
}

// In every bit; one NaN is as another.
void expect_same_quantized(const fp8::Quantized& found, const fp8::Quantized& expected, const std::string& of) {
  const auto numbers = [](const at::Tensor& values) { return values.cpu().to(at::kFloat); };
  const at::Tensor wrong_bits = found.values.cpu().view(at::kByte).ne(expected.values.view(at::kByte));
  EXPECT_FALSE(wrong_bits.logical_and_(numbers(expected.values).isnan().logical_not_()).any().item<bool>()) << of;
  EXPECT_TRUE(torch::equal(numbers(found.values).isnan(), numbers(expected.values).isnan())) << of;
  EXPECT_TRUE(torch::allclose(numbers(found.inverse), expected.inverse, 0, 0, /*equal_nan=*/true)) << of;
  EXPECT_TRUE(found.values.is_contiguous() && found.values.sizes() == expected.values.sizes()) << of;
}

// The kernels, against LibTorch's operators on the CPU. Stored scales are taken, too large, too small, and none.
TEST_F(GpuFp8, QuantisesAsOperatorsDo) {
  if (device_.is_cpu()) GTEST_SKIP() << "DS_TEST_DEVICE=cpu: the operators are what kernels are compared with";
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const at::ScalarType format : {fp8::kE4M3, fp8::kE5M2}) {
      for (const double bad : {0.0, kInfinity, -kInfinity, std::numeric_limits<double>::quiet_NaN()}) {
        const at::Tensor values = spread_values(37, 51, type, bad);  // not in whole packs
        for (const double stored : {-1.0, 0.0, 1e-3, 0.01, 1e6}) {
          for (const bool covers : {false, true}) {
            const at::Tensor scale = stored < 0 ? at::Tensor() : torch::full({}, stored, torch::kFloat);
            const at::Tensor record = torch::full({}, covers ? 1e30 : 0.5, torch::kFloat);
            const at::Tensor record_there = record.to(device_, /*non_blocking=*/false, /*copy=*/true);
            const fp8::Measured expected = fp8::quantize_measured_by_operators(
                values, format, {.stored = scale, .covers = covers, .margin = 1, .record = record});
            const fp8::Measured found = fp8::quantize_measured(values.to(device_), format,
                                                               {.stored = scale.defined() ? scale.to(device_) : scale,
                                                                .covers = covers,
                                                                .margin = 1,
                                                                .record = record_there});
            const std::string of = cat(c10::toString(type), " to ", c10::toString(format), ", bad ", bad, ", stored ",
                                       stored, ", covers ", covers);
            expect_same_quantized(found.matrix, expected.matrix, of);
            EXPECT_TRUE(torch::allclose(found.amax.cpu(), expected.amax, 0, 0, /*equal_nan=*/true)) << of;
            EXPECT_EQ(record_there.item<float>(), record.item<float>()) << of;
          }
        }
      }
    }
  }
  const at::Tensor values = spread_values(32, 48, at::kBFloat16, 0).t();
  expect_same_quantized(fp8::quantize_measured(values.to(device_), fp8::kE4M3, {}).matrix,
                        fp8::quantize_measured(values, fp8::kE4M3, {}).matrix, "columns of a matrix");
  const auto none = fp8::quantize_measured(torch::zeros({0, 16}).to(device_), fp8::kE4M3, {});
  EXPECT_EQ(none.amax.item<float>(), 0.0F);
  EXPECT_EQ(none.matrix.inverse.item<float>(), 1.0F);
}

TEST_F(GpuFp8, TransposesBytes) {
  for (const auto& [rows, columns] : {std::pair(1, 1), std::pair(3, 200), std::pair(128, 128), std::pair(132, 260),
                                      std::pair(16, 4096), std::pair(129, 131), std::pair(0, 16)}) {
    const at::Tensor bytes = torch::randint(0, 120, {rows, columns}, torch::kByte);
    const fp8::Quantized matrix{bytes.to(device_).view(fp8::kE4M3), torch::ones({}).to(device_)};
    const at::Tensor found = fp8::transposed(matrix).values;
    EXPECT_TRUE(found.is_contiguous());
    EXPECT_TRUE(torch::equal(found.view(torch::kByte).cpu(), bytes.t())) << rows << " x " << columns;
  }
}

TEST_F(GpuFp8, QuantisesRowsAndBlocksAsOperatorsDo) {
  if (device_.is_cpu()) GTEST_SKIP() << "DS_TEST_DEVICE=cpu: the operators are what kernels are compared with";
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const at::ScalarType format : {fp8::kE4M3, fp8::kE5M2}) {
      for (const double bad : {0.0, std::numeric_limits<double>::quiet_NaN()}) {
        const at::Tensor values = spread_values(256, 384, type, bad);
        const std::string of = cat(c10::toString(type), " to ", c10::toString(format), ", bad ", bad);
        expect_same_quantized(fp8::quantize_rows(values.to(device_), format, 0), fp8::quantize_rows(values, format, 0),
                              of + ", rows");
        expect_same_quantized(fp8::quantize_blocks(values.to(device_), format, 2),
                              fp8::quantize_blocks(values, format, 2), of + ", blocks");
      }
    }
  }
  EXPECT_EQ(fp8::quantize_rows(torch::zeros({0, 256}).to(device_), fp8::kE4M3, 0).inverse.size(1), 2);
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
