// Where parts get their first values from, and what the engine shows of one parameter.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/check.h"
#include "core/split/split_tensor.h"
#include "dsengine/checkpoint.h"
#include "tests/model/small_run.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using enum parallel::Style;

constexpr int64_t kWide = 16;

struct Layer : torch::nn::Module {
  Layer(const std::vector<int64_t>& sizes, int64_t outputs, at::Device device) {
    weight = register_parameter("weight", torch::empty(sizes, device));
    bias = register_parameter("bias", torch::empty({outputs}, device));
  }
  at::Tensor weight, bias;
};

// Values of a formula, times `scale`.
struct MlpImpl : torch::nn::Module {
  explicit MlpImpl(double scale = 1.0, at::Device device = at::kCPU) {
    fc = register_module("fc", std::make_shared<Layer>(std::vector<int64_t>{2 * kWide, 6}, 2 * kWide, device));
    norm = register_module("norm", std::make_shared<Layer>(std::vector<int64_t>{2 * kWide}, 2 * kWide, device));
    proj = register_module("proj", std::make_shared<Layer>(std::vector<int64_t>{kWide, 2 * kWide}, kWide, device));
    factor = register_buffer("factor", torch::full({kWide}, scale, device));
    if (device.is_meta()) return;
    fill(*this);
    const torch::NoGradGuard no_grad;
    for (const at::Tensor& parameter : parameters()) parameter.mul_(scale);
  }
  at::Tensor loss(const at::Tensor& x) {
    const at::Tensor inner = torch::linear(x, fc->weight, fc->bias);
    const at::Tensor even = torch::layer_norm(inner, {2 * kWide}, norm->weight, norm->bias);
    return (torch::linear(torch::tanh(even), proj->weight, proj->bias) * factor).pow(2).mean();
  }

  std::shared_ptr<Layer> fc, norm, proj;
  at::Tensor factor;
};
TORCH_MODULE(Mlp);

nlohmann::json mlp_config(int stage) {
  nlohmann::json config = small_config(stage, 1);
  config["tensor_parallel"] = {{"autotp_size", 2}};
  config["gradient_clipping"] = 1.0;
  config["log_level"] = "warning";
  return config;
}

InitializeOptions mlp_options(Mlp& model, comm::Communicator& world, int stage) {
  return {.model = model.ptr(),
          .config = mlp_config(stage),
          .split = {{"fc", kColumn}, {"norm", kColumn}, {"proj", kRow}},
          .communicator = borrowed(world)};
}

// Of rank 0's values, in one process, after three steps.
State expected_state(int data) {
  Mlp model;
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(0.02).weight_decay(0.1));
  for (int64_t step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    for (int rank = 0; rank < data; ++rank) (model->loss(sample(step, rank)) / static_cast<double>(data)).backward();
    torch::nn::utils::clip_grad_norm_(model->parameters(), 1.0);
    optimizer.step();
  }
  return parameters_of(*model);
}

State trained(Engine& engine, Mlp& model) {
  for (int64_t step = 0; step < 3; ++step) {
    engine.backward(model->loss(sample(step, engine.communicator().rank())));
    engine.step();
  }
  State state;
  for (const auto& item : model->named_parameters()) {
    state[item.key()] = engine.safe_get_full_fp32_param(item.value());
  }
  return state;
}

class TensorParallelStart : public ::testing::TestWithParam<int> {};

INSTANTIATE_TEST_SUITE_P(Stages, TensorParallelStart, ::testing::Values(0, 3),
                         [](const auto& stage) { return cat("stage", stage.param); });

TEST_P(TensorParallelStart, FromTheModuleOfRankZero) {
  const State expected = expected_state(2);
  test::run_ranks(4, [&](comm::Communicator& world) {
    Mlp model(world.rank() == 0 ? 1.0 : 7.0);
    const auto engine = initialize(mlp_options(model, world, GetParam())).engine;
    EXPECT_TRUE(is_split(model->fc->weight));
    EXPECT_LT(largest_difference(trained(*engine, model), expected), 2e-6);
  });
}

TEST_P(TensorParallelStart, FromAModelThatIsSlicedWhileItIsBuilt) {
  const State expected = expected_state(2);
  for (const bool all : {true, false}) {  // or proj, which is sliced too, stays whole
    test::run_ranks(4, [&](comm::Communicator& world) {
      zero::Init init(borrowed(world), {.max_live = 64, .smallest = 64});
      Mlp model(world.rank() == 0 ? 1.0 : 7.0);
      InitializeOptions options = mlp_options(model, world, GetParam());
      options.communicator = nullptr;
      options.init = &init;
      if (!all) options.split = {{"fc", kColumn}};
      const auto engine = initialize(options).engine;
      EXPECT_EQ(init.held_bytes(), 0);
      EXPECT_LT(largest_difference(trained(*engine, model), expected), 2e-6);
    });
  }
}

TEST_P(TensorParallelStart, FromAFileForAModelWithoutMemory) {
  const State expected = expected_state(2);
  const test::ScratchFolder folder;
  const std::string path = folder / "model.safetensors";
  {
    const Mlp model;
    std::vector<std::pair<std::string, at::Tensor>> weights;
    for (const auto& item : model->named_parameters()) weights.emplace_back(item.key(), item.value().detach());
    for (const auto& item : model->named_buffers()) weights.emplace_back(item.key(), item.value());
    checkpoint::write_weights(path, weights);
  }
  test::run_ranks(4, [&](comm::Communicator& world) {
    Mlp model(1.0, at::Device(at::kMeta));
    InitializeOptions options = mlp_options(model, world, GetParam());
    EXPECT_THAT([&] { initialize(options); }, ThrowsMessage<UsageError>(HasSubstr("on the meta device")));
  });
  test::run_ranks(4, [&](comm::Communicator& world) {
    Mlp model(1.0, at::Device(at::kMeta));
    InitializeOptions options = mlp_options(model, world, GetParam());
    options.weights = path;
    const auto engine = initialize(options).engine;
    EXPECT_EQ(model->fc->weight.device(), at::Device(at::kCPU));
    EXPECT_LT(largest_difference(trained(*engine, model), expected), 2e-6);
  });
}

TEST(TensorParallelWeights, AFileThatOneRankCannotOpenEndsAll) {
  const test::ScratchFolder folder;
  const std::string path = folder / "model.safetensors";
  {
    const Mlp model;
    std::vector<std::pair<std::string, at::Tensor>> weights;
    for (const auto& item : model->named_parameters()) weights.emplace_back(item.key(), item.value().detach());
    checkpoint::write_weights(path, weights);
  }
  test::run_ranks(4, [&](comm::Communicator& world) {
    Mlp model;
    InitializeOptions options = mlp_options(model, world, 1);
    options.weights = world.rank() == 1 ? path + ".missing" : path;  // the first rank of the second parts
    if (world.rank() == 1) {
      EXPECT_THAT([&] { initialize(options); }, ThrowsMessage<IoError>(HasSubstr(".missing")));
    } else {
      EXPECT_THAT([&] { initialize(options); },
                  ThrowsMessage<IoError>(AllOf(HasSubstr("rank 1 could not use"), HasSubstr(".missing"))));
    }
  });
}

// A name that means a layer that stays whole, and one that means nothing.
TEST(TensorParallelRules, AModelOfWhichNothingIsSplitIsAnErrorThatSaysWhatToWrite) {
  for (const char* name : {"gate", "scores"}) {
    test::run_ranks(2, [&](comm::Communicator& world) {
      const auto model = std::make_shared<torch::nn::Module>();
      model->register_module(name, torch::nn::Linear(8, 8));
      const auto begin = [&] { start(model, mlp_config(1), world); };
      EXPECT_THAT(begin, ThrowsMessage<ConfigError>(AllOf(HasSubstr("each of the 2 ranks would compute all of it"),
                                                          HasSubstr("tensor_parallel.partition_config.layer_specs"))))
          << name;
    });
  }
}

TEST_P(TensorParallelStart, ValuesOfOneParameterAreWhole) {
  test::run_ranks(2, [&](comm::Communicator& world) {
    Mlp model;
    const auto engine = initialize(mlp_options(model, world, GetParam())).engine;
    Mlp plain;
    engine->backward(model->loss(sample(0, 0)));
    plain->loss(sample(0, 0)).backward();
    const auto truth = plain->named_parameters();
    for (const auto& item : model->named_parameters()) {
      const at::Tensor gradient = engine->safe_get_full_grad(item.value());
      EXPECT_TRUE(at::allclose(gradient, truth[item.key()].grad(), 1e-4, 1e-6)) << item.key();
      EXPECT_TRUE(at::equal(engine->safe_get_full_fp32_param(item.value()), truth[item.key()].detach())) << item.key();
    }
    engine->step();
    const at::Tensor wanted = at::arange(2 * kWide * 6, at::kFloat).view({2 * kWide, 6}).sin();
    engine->safe_set_full_fp32_param(model->fc->weight, wanted);
    EXPECT_TRUE(at::equal(engine->safe_get_full_fp32_param(model->fc->weight), wanted));
    EXPECT_TRUE(at::equal(parallel::whole(model->fc->weight.detach()), wanted));
  });
}

TEST(TensorParallelMemory, IsThatOfParts) {
  test::run_ranks(2, [&](comm::Communicator& world) {
    Mlp model;
    const auto engine = initialize(mlp_options(model, world, 0)).engine;
    // Of 6 x 32 + 32 (fc), 2 x 32 (norm) and 32 x 16 (proj) a half, of 16 (proj's bias) all.
    EXPECT_EQ(*engine->plan().parameters, (6 * 32 + 32 + 2 * 32 + 32 * 16) / 2 + 16);
    EXPECT_EQ(engine->model_state_bytes().parameters, engine->plan().bytes->parameters);
    EXPECT_EQ(engine->model_state_bytes().optimizer, engine->plan().bytes->optimizer);
  });
}

}  // namespace
}  // namespace ds::engine
