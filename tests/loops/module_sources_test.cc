// Modules that fully_shard gets from elsewhere: built in parts, on the meta device.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/files/safetensors.h"
#include "core/text.h"
#include "dsengine/fully_shard.h"
#include "dsengine/zero.h"
#include "tests/loops/block_net.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thread_ranks.h"

namespace ds {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr int kSourceSteps = 5;

void expect_trains_as_torch(test::BlockNet& model, const FullyShardOptions& options, int rank) {
  const test::MakeOptimizer make = test::optimizers()[2].second;
  const auto sharded = fully_shard(model, options);
  const auto optimizer = make(sharded->parameters());
  test::train(model, *optimizer, rank, kSourceSteps);
  EXPECT_LT(test::largest_difference(sharded->full_state_dict(), test::train_plain(2, kSourceSteps, make)), 5e-6);
}

TEST(ModuleSources, BuiltInPartsByZeroInit) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    zero::Init init(test::borrowed(communicator), {.max_live = 100, .smallest = 8});
    test::BlockNet model;
    EXPECT_GT(init.held_bytes(), 0);
    expect_trains_as_torch(model, {.process_group = test::borrowed(communicator), .init = &init}, communicator.rank());
    EXPECT_EQ(init.held_bytes(), 0);
  });
}

TEST(ModuleSources, UnitsOfAModelThatIsBuiltInPartsAreTakenOneByOne) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    zero::Init init(test::borrowed(communicator), {.max_live = 100, .smallest = 8});
    test::BlockNet model;
    const FullyShardOptions options{.process_group = test::borrowed(communicator), .init = &init};
    for (test::Block& block : model->blocks) {
      const int64_t before = init.held_bytes();
      fully_shard(block, options);
      EXPECT_LT(init.held_bytes(), before);
    }
    EXPECT_GT(init.held_bytes(), 0);  // of what is in no unit
    expect_trains_as_torch(model, options, communicator.rank());
    EXPECT_EQ(init.held_bytes(), 0);
    EXPECT_LE(init.peak_elements(), 13 * 6 + 100);
  });
}

// A unit's slices are float32 in any dtype of its parameters.
TEST(ModuleSources, WhatAUnitHasTrainedIsTakenOverBitByBit) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    test::BlockNet model;
    model->blocks[1]->norm->weight.set_requires_grad(false);
    const FullyShardOptions options{.process_group = test::borrowed(communicator),
                                    .mp_policy = {.param_dtype = at::kBFloat16}};
    const auto unit = fully_shard(model->blocks[1], options);
    torch::optim::SGD optimizer(unit->parameters(), 0.3);
    model->blocks[1]->forward(test::batch_of(0, 0).narrow(1, 0, 1).expand({4, 6}).to(at::kBFloat16)).sum().backward();
    optimizer.step();
    const StateDict trained = unit->full_state_dict();
    const auto sharded = fully_shard(model, options);
    StateDict found;
    for (const auto& [name, value] : sharded->full_state_dict()) {
      if (name.starts_with("block1.")) found.emplace_back(name.substr(7), value);
    }
    EXPECT_EQ(test::largest_difference(found, trained), 0);
    EXPECT_EQ(found.size(), 6U);
    EXPECT_FALSE(trained[0].second.equal(trained[0].second.to(at::kBFloat16).to(at::kFloat)));
  });
}

// --- the meta device
// ----------------------------------------------------------------------------------------------------

// A module that takes no memory before fully_shard gives it some.
struct MetaSourceImpl : torch::nn::Module {
  explicit MetaSourceImpl(c10::Device device) {
    const auto options = torch::TensorOptions().device(device);
    first = register_parameter("first", torch::empty({9, 5}, options));
    frozen = register_parameter("frozen", torch::empty({9, 9}, options), /*requires_grad=*/false);
    last = register_parameter("last", torch::empty({2, 9}, options));
    scale = register_buffer("scale", torch::empty({9}, options));
  }
  at::Tensor loss(const at::Tensor& x) {
    const at::Tensor h = torch::tanh(torch::linear(torch::linear(x, first), frozen)) * scale;
    return (torch::linear(h, last) - x.narrow(1, 0, 2).sin()).pow(2).mean();
  }
  at::Tensor first, frozen, last, scale;
};
TORCH_MODULE(MetaSource);

MetaSource real_source() {
  MetaSource model(at::kCPU);
  test::fill(*model);
  model->scale.copy_(torch::linspace(0.5, 1.5, 9));
  return model;
}

std::string source_file(const test::ScratchFolder& folder) {
  const std::string path = (folder.path() / "weights.safetensors").string();
  write_safetensors(path, test::state_values(*real_source()));
  return path;
}

TEST(ModuleSources, MetaWithADeviceAndWeightsTrainsAsTorch) {
  const test::ScratchFolder folder;
  const std::string path = source_file(folder);
  const test::MakeOptimizer make = test::optimizers()[2].second;
  MetaSource plain = real_source();
  const auto adamw = make({plain->first, plain->last});
  for (int step = 0; step < kSourceSteps; ++step) {
    adamw->zero_grad();
    plain->loss(test::joined_batch(step, 2)).backward();
    adamw->step();
  }
  const test::NamedValues expected = test::state_values(*plain);
  for (const bool reshards : {true, false}) {
    test::run_ranks(2, [&](comm::Communicator& communicator) {
      MetaSource model(at::kMeta);
      const auto sharded = fully_shard(model, {.process_group = test::borrowed(communicator),
                                               .reshard_after_forward = reshards,
                                               .device = "cpu",
                                               .weights = path});
      const auto optimizer = make(sharded->parameters());
      for (int step = 0; step < kSourceSteps; ++step) {
        model->loss(test::batch_of(step, communicator.rank())).backward();
        optimizer->step();
        optimizer->zero_grad();
      }
      EXPECT_LT(test::largest_difference(sharded->full_state_dict(), expected), 5e-6);
    });
  }
}

TEST(ModuleSources, MetaWithoutADeviceIsRefusedByName) {
  const test::ScratchFolder folder;
  const std::string path = source_file(folder);
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    MetaSource model(at::kMeta);
    EXPECT_THAT([&] { fully_shard(model, {.process_group = test::borrowed(communicator), .weights = path}); },
                ThrowsMessage<ConfigError>(AllOf(HasSubstr("fully_shard: the module is on the meta device"),
                                                 HasSubstr("expected .device"), HasSubstr("found none"))));
  });
}

struct MetaLayerImpl : torch::nn::Module {
  explicit MetaLayerImpl(c10::Device device) {
    const auto options = torch::TensorOptions().device(device);
    weight = register_parameter("weight", torch::empty({7, 7}, options));
    bias = register_parameter("bias", torch::empty({7}, options));
  }
  at::Tensor forward(const at::Tensor& x) { return torch::tanh(torch::linear(x, weight, bias)) + x; }
  at::Tensor weight, bias;
};
TORCH_MODULE(MetaLayer);

struct MetaNetImpl : torch::nn::Module {
  explicit MetaNetImpl(c10::Device device) {
    const auto options = torch::TensorOptions().device(device);
    first = register_parameter("first", torch::empty({7, 5}, options));
    for (int i = 0; i < 2; ++i) layers.push_back(register_module(cat("layer", i), MetaLayer(device)));
    last = register_parameter("last", torch::empty({2, 7}, options), /*requires_grad=*/false);
    scale = register_buffer("scale", torch::empty({7}, options));
  }
  at::Tensor loss(const at::Tensor& x) {
    at::Tensor h = torch::linear(x, first);
    for (MetaLayer& layer : layers) h = layer(h);
    return (torch::linear(h * scale, last) - x.narrow(1, 0, 2).sin()).pow(2).mean();
  }
  std::vector<MetaLayer> layers;
  at::Tensor first, last, scale;
};
TORCH_MODULE(MetaNet);

MetaNet real_net() {
  MetaNet model(at::kCPU);
  test::fill(*model);
  model->scale.copy_(torch::linspace(0.5, 1.5, 7));
  return model;
}

void train_net(MetaNet& model, const test::Tensors& parameters, const std::function<at::Tensor(int64_t)>& batch) {
  const auto optimizer = test::optimizers()[2].second(parameters);
  for (int step = 0; step < kSourceSteps; ++step) {
    model->loss(batch(step)).backward();
    optimizer->step();
    optimizer->zero_grad();
  }
}

// `values`: how the sharded model gets those of real_net().
struct MetaUnits {
  std::string weights = {};  // of the call for the model
  std::function<void(MetaNet&, std::vector<std::shared_ptr<FullySharded>>& units, FullySharded&)> values = nullptr;
};

void expect_meta_units_train_as_torch(const MetaUnits& way) {
  MetaNet plain = real_net();
  train_net(plain,
            {plain->first, plain->layers[0]->weight, plain->layers[0]->bias, plain->layers[1]->weight,
             plain->layers[1]->bias},
            [](int64_t step) { return test::joined_batch(step, 2); });
  const StateDict expected = test::state_values(*plain);
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    MetaNet model(at::kMeta);
    FullyShardOptions options{.process_group = test::borrowed(communicator), .device = "cpu"};
    std::vector<std::shared_ptr<FullySharded>> units;
    for (MetaLayer& layer : model->layers) units.push_back(fully_shard(layer, options));
    options.weights = way.weights;
    const auto sharded = fully_shard(model, options);
    // Slices of four buckets, which are padded; 161 elements have a value.
    EXPECT_LE(sharded->held_bytes().parameters, 4 * (96 + 96 + 64 + 32) / 2);
    if (way.values) {
      EXPECT_THAT([&] { model->loss(test::batch_of(0, 0)).backward(); },
                  ThrowsMessage<UsageError>(AllOf(HasSubstr("was on the meta device when fully_shard was called"),
                                                  HasSubstr("sharded->load_full_state_dict()"))));
      way.values(model, units, *sharded);
    }
    train_net(model, sharded->parameters(), [&](int64_t step) { return test::batch_of(step, communicator.rank()); });
    EXPECT_LT(test::largest_difference(sharded->full_state_dict(), expected), 5e-6);
  });
}

TEST(MetaUnits, GetTheirValuesFromAFileOfTheModel) {
  const test::ScratchFolder folder;
  const std::string path = (folder.path() / "weights.safetensors").string();
  write_safetensors(path, test::state_values(*real_net()));
  expect_meta_units_train_as_torch({.weights = path});
}

TEST(MetaUnits, GetTheirValuesFromAStateDict) {
  const StateDict state = test::state_values(*real_net());
  expect_meta_units_train_as_torch(
      {.values = [&](MetaNet&, auto&, FullySharded& sharded) { sharded.load_full_state_dict(state); }});
}

TEST(MetaUnits, GetTheirValuesFromACheckpoint) {
  const test::ScratchFolder folder;
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    MetaNet model = real_net();
    fully_shard(model, {.process_group = test::borrowed(communicator)})->save(folder.path().string(), "start");
  });
  expect_meta_units_train_as_torch(
      {.values = [&](MetaNet&, auto&, FullySharded& sharded) { sharded.load(folder.path().string()); }});
}

// As an initialization of a unit after the other does.
TEST(MetaUnits, GetTheirValuesInPlace) {
  const MetaNet real = real_net();
  expect_meta_units_train_as_torch({.values = [&](MetaNet& model, auto& units, FullySharded& sharded) {
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < units.size(); ++i) {
      units[i]->unshard();
      model->layers[i]->weight.copy_(real->layers[i]->weight);
      model->layers[i]->bias.copy_(real->layers[i]->bias);
      units[i]->reshard();
    }
    sharded.unshard();
    model->first.copy_(real->first);
    model->last.copy_(real->last);
    model->scale.copy_(real->scale);
    sharded.reshard();
  }});
}

TEST(MetaUnits, ABufferOfWholeNumbersHasToHaveThem) {
  test::run_ranks(2, [](comm::Communicator& communicator) {
    MetaNet model(at::kMeta);
    model->register_buffer("steps", torch::empty({1}, torch::dtype(torch::kLong).device(at::kMeta)));
    EXPECT_THAT([&] { fully_shard(model, {.process_group = test::borrowed(communicator), .device = "cpu"}); },
                ThrowsMessage<UsageError>(AllOf(HasSubstr("buffer steps is on the meta device"), HasSubstr("Long"))));
  });
}

}  // namespace
}  // namespace ds
