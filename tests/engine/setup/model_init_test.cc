// Models that are sliced while they are built (zero::Init), and models that start from a weight file.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>

#include "core/check.h"
#include "core/files/safetensors.h"
#include "dsengine/engine.h"
#include "tests/model/small_run.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr int kInitRanks = 3;
constexpr int64_t kLayers = 12;
constexpr int64_t kWide = 16;
constexpr int64_t kLayerElements = kWide * kWide;
constexpr int64_t kFewLayers = 3 * kLayerElements;

// As modules are: allocate, register, then random values; a second pass over all of them at the end.
struct DeepNetImpl : torch::nn::Module {
  explicit DeepNetImpl(float scale = 1.0F) {
    for (int64_t i = 0; i < kLayers; ++i) {
      layers.push_back(register_module(cat("layer", i), torch::nn::Linear(torch::nn::LinearOptions(kWide, kWide))));
    }
    // Made by an operator and registered: no operator reads it here.
    gain = register_parameter("gain", torch::full({kWide, kWide}, 0.5));
    fill(*this);
    const torch::NoGradGuard no_grad;
    for (const at::Tensor& parameter : parameters()) parameter.mul_(scale);
  }
  at::Tensor loss(at::Tensor x) {
    x = torch::nn::functional::pad(x, torch::nn::functional::PadFuncOptions({0, kWide - 6}));
    for (auto& layer : layers) x = torch::tanh(layer(x));
    return torch::linear(x, gain).pow(2).mean();
  }
  std::vector<torch::nn::Linear> layers;
  at::Tensor gain;
};
TORCH_MODULE(DeepNet);

ordered_json deep_config(int stage) {
  ordered_json config = small_config(stage, 1);
  config["zero_optimization"]["reduce_bucket_size"] = 2 * kLayerElements;
  return config;
}

State trained(Engine& engine, DeepNet& model, int rank) {
  for (int64_t step = 0; step < 3; ++step) {
    engine.backward(model->loss(sample(step, rank)));
    engine.step();
  }
  return copy_of(engine.fp32_state_dict());
}

class ModelInitTest : public ::testing::TestWithParam<int> {};

INSTANTIATE_TEST_SUITE_P(Stages, ModelInitTest, ::testing::Range(0, 4),
                         [](const auto& stage) { return cat("stage", stage.param); });

TEST_P(ModelInitTest, TrainsAsAModelThatWasBuiltWhole) {
  for (const int world : {1, 2, kInitRanks}) {
    test::run_ranks(world, [&](comm::Communicator& communicator) {
      State expected;
      {
        DeepNet model;
        const auto engine = start(model.ptr(), deep_config(GetParam()), communicator).engine;
        expected = trained(*engine, model, communicator.rank());
      }
      zero::Init init(borrowed(communicator), {.max_live = kFewLayers, .smallest = 32});
      // Another model on the other ranks: rank 0's values count.
      DeepNet model(communicator.rank() == 0 ? 1.0F : 7.0F);
      if (world > 1) {
        EXPECT_LE(init.peak_elements(), kFewLayers + kLayerElements);
        const int64_t sliced = (kLayers + 1) * kLayerElements - init.live_elements();
        EXPECT_GE(init.held_bytes() * world, sliced * 4);
      }
      const auto engine = initialize({.model = model.ptr(), .config = deep_config(GetParam()), .init = &init}).engine;
      EXPECT_EQ(init.held_bytes(), 0);
      EXPECT_EQ(largest_difference(trained(*engine, model, communicator.rank()), expected), 0.0);
    });
  }
}

TEST(ModelInit, ReadsAndChangesOfSlicedParametersWork) {
  test::run_ranks(kInitRanks, [](comm::Communicator& communicator) {
    zero::Init init(borrowed(communicator), {.max_live = kLayerElements, .smallest = 32});
    const DeepNet model;
    {
      const torch::NoGradGuard no_grad;
      for (int pass = 0; pass < 2; ++pass) {
        for (const at::Tensor& parameter : model->parameters()) parameter.add_(1.0);
      }
    }
    for (int64_t i = 0; i < kLayers; ++i) {
      const at::Tensor weight = model->layers[static_cast<size_t>(i)]->weight;
      const at::Tensor steps = torch::arange(weight.numel(), torch::kDouble) * 0.7 + static_cast<double>(2 * i + 1);
      const at::Tensor expected = (torch::sin(steps) * 0.4).view(weight.sizes()).to(torch::kFloat) + 1.0 + 1.0;
      EXPECT_TRUE(weight.allclose(expected, 0, 1e-6)) << "layer " << i;
    }
    init.rethrow();
    EXPECT_LE(init.peak_elements(), 2 * kLayerElements);
  });
}

TEST(ModelInit, AModelCanBeConvertedWhileItIsBuilt) {
  test::run_ranks(2, [](comm::Communicator& communicator) {
    zero::Init init(borrowed(communicator), {.max_live = kFewLayers, .smallest = 32});
    DeepNet model;
    model->to(torch::kBFloat16);
    for (const at::Tensor& parameter : model->parameters()) parameter.detach().mul(1.0);
    EXPECT_LE(init.live_elements(), kFewLayers);
    ordered_json config = deep_config(3);
    config["bf16"]["enabled"] = true;
    const auto engine = initialize({.model = model.ptr(), .config = config, .init = &init}).engine;
    DeepNet reference;
    const State expected = parameters_of(*reference);
    for (const auto& [name, tensor] : engine->module_state_dict()) {
      EXPECT_TRUE(tensor.equal(expected.at(name).to(torch::kBFloat16))) << name;
    }
  });
}

// The same values whether the model is built whole or sliced.
void expect_same_model(const std::function<void(DeepNetImpl&)>& change) {
  DeepNet reference;
  change(*reference);
  const State expected = parameters_of(*reference);
  test::run_ranks(kInitRanks, [&](comm::Communicator& communicator) {
    for (const int64_t max_live : {int64_t{0}, kFewLayers, int64_t{1} << 30}) {
      zero::Init init(borrowed(communicator), {.max_live = max_live, .smallest = 32});
      DeepNet model;
      change(*model);
      const auto engine = initialize({.model = model.ptr(), .config = deep_config(3), .init = &init}).engine;
      const State found = copy_of(engine->module_state_dict());
      for (const auto& [name, tensor] : expected) {
        EXPECT_TRUE(found.at(name).equal(tensor.to(torch::kFloat))) << name << " max_live " << max_live;
      }
    }
  });
}

TEST(ModelInit, ConvertedParametersThatAreChangedInPlace) {
  expect_same_model([](DeepNetImpl& model) {
    const torch::NoGradGuard no_grad;
    model.to(torch::kBFloat16);
    for (at::Tensor& parameter : model.parameters()) parameter.mul_(0.5);
    model.to(torch::kFloat);
    for (at::Tensor& parameter : model.parameters()) parameter.add_(0.25);
  });
}

TEST(ModelInit, ChangesThroughDataCount) {
  expect_same_model([](DeepNetImpl& model) {
    for (int pass = 0; pass < 2; ++pass) {
      for (at::Tensor& parameter : model.parameters()) parameter.data().mul_(0.5);
    }
  });
}

TEST(ModelInit, MemoryOfAnotherTensorIsTakenOver) {
  expect_same_model([](DeepNetImpl& model) {
    std::vector<float> foreign(kLayerElements, 0.125F);
    const at::Tensor borrowed_memory = torch::from_blob(foreign.data(), {kWide, kWide}).clone();
    model.layers[3]->weight.set_data(borrowed_memory);
    model.layers[5]->weight.set_data(torch::full({kWide, kWide}, 0.5));
    const torch::NoGradGuard no_grad;
    model.layers[5]->weight.add_(model.layers[3]->weight);
  });
}

TEST(ModelInit, ALoadedModel) {
  const test::ScratchFolder folder;
  const DeepNet saved(3.0F);
  torch::save(saved, folder / "model.pt");
  expect_same_model([&](DeepNetImpl& model) {
    torch::serialize::InputArchive archive;
    archive.load_from(folder / "model.pt");
    model.load(archive);
  });
}

TEST(ModelInit, ParametersThatWereReplacedAreForgotten) {
  test::run_ranks(2, [](comm::Communicator& communicator) {
    zero::Init init(borrowed(communicator), {.max_live = 0, .smallest = 32});
    { const DeepNet dropped; }
    DeepNet model;
    const auto engine = initialize({.model = model.ptr(), .config = deep_config(3), .init = &init}).engine;
    EXPECT_EQ(init.held_bytes(), 0);
    EXPECT_EQ(init.live_elements(), 0);
    const at::Tensor later = torch::ones({kWide, kWide}).set_requires_grad(true);
    EXPECT_TRUE((later * 1.0).equal(torch::ones({kWide, kWide})));
    EXPECT_EQ(init.live_elements(), 0);
  });
}

TEST(ModelInit, DifferentOptionsAreAnError) {
  test::run_ranks(2, [](comm::Communicator& communicator) {
    EXPECT_THAT([&] { zero::Init init(borrowed(communicator), {.max_live = 100 + communicator.rank()}); },
                ThrowsMessage<UsageError>(AllOf(HasSubstr("max_live 100"), HasSubstr("found 101"))));
  });
}

TEST(ModelInit, OneAtATime) {
  test::run_ranks(2, [](comm::Communicator& communicator) {
    const zero::Init init(borrowed(communicator));
    EXPECT_THAT([&] { zero::Init second(borrowed(communicator)); },
                ThrowsMessage<UsageError>(HasSubstr("one is alive on this thread already")));
  });
}

// What rank 0 alone can read.
class WeightFileTest : public ModelInitTest {
 protected:
  std::string written(const std::vector<std::pair<std::string, at::Tensor>>& tensors) const {
    const std::string path = folder_ / "weights.safetensors";
    write_safetensors(path, tensors);
    return path;
  }
  static std::vector<std::pair<std::string, at::Tensor>> weights_of_a_net() {
    DeepNet net(2.0F);
    std::vector<std::pair<std::string, at::Tensor>> result;
    for (const auto& item : net->named_parameters()) result.emplace_back(item.key(), item.value().detach());
    return result;
  }
  test::ScratchFolder folder_;
};

INSTANTIATE_TEST_SUITE_P(Stages, WeightFileTest, ::testing::Range(0, 4),
                         [](const auto& stage) { return cat("stage", stage.param); });

TEST_P(WeightFileTest, ParametersStartFromTheFile) {
  const auto weights = weights_of_a_net();
  const std::string path = written(weights);
  for (const bool sliced : {false, true}) {
    test::run_ranks(2, [&](comm::Communicator& communicator) {
      std::optional<zero::Init> init;
      if (sliced) init.emplace(borrowed(communicator), zero::InitOptions{.max_live = kFewLayers, .smallest = 32});
      DeepNet model;
      const auto engine = initialize({.model = model.ptr(),
                                      .config = deep_config(GetParam()),
                                      .init = init ? &*init : nullptr,
                                      .weights = communicator.rank() == 0 ? path : "/nowhere",
                                      .communicator = init ? nullptr : borrowed(communicator)})
                              .engine;
      const State found = copy_of(engine->module_state_dict());
      for (const auto& [name, tensor] : weights) EXPECT_TRUE(found.at(name).equal(tensor)) << name;
    });
  }
}

// A module that takes no memory before the engine gives it some.
struct MetaNetImpl : torch::nn::Module {
  explicit MetaNetImpl(at::Device device) {
    const auto options = torch::TensorOptions().device(device);
    first = register_parameter("first", torch::empty({8, 6}, options));
    frozen = register_parameter("frozen", torch::empty({8, 8}, options), /*requires_grad=*/false);
    scale = register_buffer("scale", torch::empty({8}, options));
  }
  at::Tensor loss(const at::Tensor& x) {
    return (torch::linear(torch::tanh(torch::linear(x, first)), frozen) * scale).pow(2).mean();
  }
  at::Tensor first, frozen, scale;
};
TORCH_MODULE(MetaNet);

TEST_P(WeightFileTest, GivesAModelOnTheMetaDeviceItsMemory) {
  MetaNet reference(torch::kCPU);
  fill(*reference);
  {
    const torch::NoGradGuard no_grad;
    reference->scale.fill_(0.25);
  }
  const std::string path =
      written({{"first", reference->first.detach()}, {"frozen", reference->frozen}, {"scale", reference->scale}});
  const at::Tensor expected = reference->loss(sample(0, 0));
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    MetaNet model(torch::kMeta);
    const auto engine = initialize({.model = model.ptr(),
                                    .config = deep_config(GetParam()),
                                    .weights = path,
                                    .communicator = borrowed(communicator)})
                            .engine;
    EXPECT_TRUE(model->first.is_cpu() && model->frozen.is_cpu() && model->scale.is_cpu());
    const at::Tensor loss = model->loss(sample(0, 0));
    EXPECT_TRUE(loss.equal(expected));
    engine->backward(loss);
    engine->step();
    EXPECT_FALSE(model->loss(sample(0, 0)).equal(expected));
  });
}

TEST_P(WeightFileTest, ABadFileIsAnErrorOnEveryRank) {
  auto weights = weights_of_a_net();
  weights.pop_back();
  const std::string missing = written(weights);
  weights.emplace_back("layer11.bias", torch::ones({3}));
  const std::string other_shape = folder_ / "shape.safetensors";
  write_safetensors(other_shape, weights);
  for (const std::string& path : {missing, other_shape, std::string("/nowhere")}) {
    test::run_ranks(2, [&](comm::Communicator& communicator) {
      DeepNet model;
      try {
        initialize({.model = model.ptr(),
                    .config = deep_config(GetParam()),
                    .weights = path,
                    .communicator = borrowed(communicator)});
        ADD_FAILURE() << "accepted " << path;
      } catch (const Error& error) {
        const std::string text = error.what();
        EXPECT_THAT(text, HasSubstr(path));
        if (communicator.rank() != 0) return;
        if (path == missing) EXPECT_THAT(text, HasSubstr("has no tensor \"layer11.bias\""));
        if (path == other_shape) EXPECT_THAT(text, AllOf(HasSubstr("expected shape [16]"), HasSubstr("found [3]")));
      }
    });
  }
}

TEST(ModelInit, TheMetaDeviceNeedsAFile) {
  test::run_ranks(2, [](comm::Communicator& communicator) {
    MetaNet model(torch::kMeta);
    EXPECT_THAT([&] { start(model.ptr(), deep_config(3), communicator); },
                ThrowsMessage<UsageError>(HasSubstr("first is on the meta device")));
  });
}

}  // namespace
}  // namespace ds::engine
