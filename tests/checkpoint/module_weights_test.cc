// Weights of a checkpoint in a plain module.
#include "checkpoint/module_weights.h"

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/check.h"
#include "tests/checkpoint/source/memory_source.h"

namespace ds::checkpoint {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using testing::ThrowsMessage;

struct WeightsNet : torch::nn::Module {
  explicit WeightsNet(bool tie = true) {
    first = register_module("first", torch::nn::Linear(3, 4));
    norm = register_module("norm", torch::nn::BatchNorm1d(4));
    head = register_module("head", std::make_shared<torch::nn::Module>());
    head->register_parameter("weight", tie ? first->weight : torch::zeros({4, 3}));
    scale = register_parameter("scale", torch::zeros({}));
    fixed = register_parameter("fixed", torch::zeros({5}), /*requires_grad=*/false);
  }
  torch::nn::Linear first{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  std::shared_ptr<torch::nn::Module> head;
  at::Tensor scale, fixed;
};

// What a checkpoint of a tied WeightsNet holds; the head only as an alias.
struct NetSource : MemorySource {
  NetSource() {
    double next = 1;
    const auto put = [&](const std::string& path, std::vector<int64_t> sizes) {
      add(path, torch::full(sizes, next, torch::kFloat) + torch::rand(sizes) * 0.1);
      next += 1;
    };
    put("weights/first.weight", {4, 3});
    put("weights/first.bias", {4});
    put("weights/norm.weight", {4});
    put("weights/norm.bias", {4});
    put("weights/scale", {});
    put("weights/fixed", {5});
    put("buffers/norm.running_mean", {4});
    put("buffers/norm.running_var", {4});
    add("buffers/norm.num_batches_tracked", torch::tensor(17, torch::kLong));
    add("optimizer/exp_avg/first.weight", torch::ones({4, 3}));
    add("ranks/0/rng.cpu", torch::ones({4}, torch::kByte));
    add_alias("head.weight", "first.weight");
  }
};

std::map<std::string, at::Tensor> values_of(const torch::nn::Module& module) {
  std::map<std::string, at::Tensor> values;
  for (const auto& item : module.named_parameters()) values[item.key()] = item.value().detach().clone();
  for (const auto& item : module.named_buffers()) values[item.key()] = item.value().detach().clone();
  return values;
}

void expect_unchanged(const torch::nn::Module& module, const std::map<std::string, at::Tensor>& before) {
  for (const auto& [name, value] : values_of(module)) EXPECT_TRUE(torch::equal(value, before.at(name))) << name;
}

TEST(ModuleWeights, AllOfThemIntoTheModulesOwnTensors) {
  NetSource source;
  WeightsNet net;
  const void* memory = net.first->weight.data_ptr();
  load_module(source, net);
  for (const auto& item : net.named_parameters()) {
    const std::string name = item.key() == "head.weight" ? "first.weight" : item.key();
    EXPECT_TRUE(torch::equal(item.value(), source.tensor(weight_path(name)))) << item.key();
  }
  for (const auto& item : net.named_buffers()) {
    EXPECT_TRUE(torch::equal(item.value(), source.tensor(buffer_path(item.key())))) << item.key();
  }
  EXPECT_EQ(net.first->weight.data_ptr(), memory);
  EXPECT_TRUE(net.head->named_parameters()["weight"].is_same(net.first->weight));
  EXPECT_TRUE(net.first->weight.requires_grad());
  EXPECT_FALSE(net.fixed.requires_grad());
  EXPECT_FALSE(net.first->weight.grad().defined());
}

TEST(ModuleWeights, OtherDtypesAndLayouts) {
  NetSource source;
  for (const at::ScalarType dtype : {at::kHalf, at::kBFloat16, at::kDouble}) {
    WeightsNet net;
    net.to(dtype);
    load_module(source, net);
    EXPECT_TRUE(torch::equal(net.first->weight, source.tensor("weights/first.weight").to(dtype)));
    EXPECT_EQ(net.norm->named_buffers()["num_batches_tracked"].item<int64_t>(), 17);
  }
  WeightsNet net(/*tie=*/false);
  net.first->weight.set_data(torch::zeros({3, 4}).t());
  load_module(source, net);
  EXPECT_FALSE(net.first->weight.is_contiguous());
  EXPECT_TRUE(torch::equal(net.first->weight, source.tensor("weights/first.weight")));
}

TEST(ModuleWeights, TiedThereAndNotHere) {
  NetSource source;
  WeightsNet net(/*tie=*/false);
  load_module(source, net);
  EXPECT_TRUE(torch::equal(net.head->named_parameters()["weight"], source.tensor("weights/first.weight")));
  EXPECT_FALSE(net.head->named_parameters()["weight"].is_same(net.first->weight));
}

TEST(ModuleWeights, TiedHereAndNotThere) {
  NetSource source;
  source.add("weights/head.weight", torch::full({4, 3}, -1.0));
  WeightsNet net;
  const auto before = values_of(net);
  // Which of the two is right cannot be known.
  EXPECT_THAT([&] { load_module(source, net); },
              ThrowsMessage<UsageError>(AllOf(HasSubstr("weights/head.weight"), HasSubstr("does not have"))));
  expect_unchanged(net, before);
  load_module(source, net, /*strict=*/false);
  EXPECT_TRUE(torch::equal(net.first->weight, source.tensor("weights/first.weight")));
}

// Stored under the other of its names: the program registered its modules in another order.
TEST(ModuleWeights, AnyNameOfATiedParameter) {
  MemorySource source;
  const NetSource full;
  for (const auto& [path, tensor] : full.tensors()) {
    if (path == "weights/first.weight") continue;
    source.add(path, torch::full(tensor.sizes, 3, tensor.dtype));
  }
  source.add("weights/head.weight", torch::full({4, 3}, 8.0));
  WeightsNet net;
  load_module(source, net);
  EXPECT_TRUE(torch::equal(net.first->weight, torch::full({4, 3}, 8.0)));
  EXPECT_EQ(weight_for(source, {"first.weight", "head.weight"}), "weights/head.weight");
  EXPECT_EQ(weight_for(source, {"first.weight"}), "");
  source.add_alias("dangling", "nothing");
  EXPECT_EQ(weight_for(source, {"dangling"}), "");
}

TEST(ModuleWeights, StrictNamesWhatOnlyOneHas) {
  NetSource source;
  WeightsNet net;
  net.register_parameter("mine", torch::full({2}, 4.0));
  net.register_buffer("my_buffer", torch::full({2}, 5.0));
  source.add("weights/theirs", torch::ones({3}));
  const auto before = values_of(net);
  EXPECT_THAT([&] { load_module(source, net); },
              ThrowsMessage<UsageError>(AllOf(HasSubstr("weights/mine"), HasSubstr("buffers/my_buffer"),
                                              HasSubstr("weights/theirs"), HasSubstr("strict = false"),
                                              Not(HasSubstr("exp_avg")), Not(HasSubstr("rng")))));
  expect_unchanged(net, before);
  load_module(source, net, /*strict=*/false);
  EXPECT_TRUE(torch::equal(net.named_parameters()["mine"], torch::full({2}, 4.0)));
  EXPECT_TRUE(torch::equal(net.named_buffers()["my_buffer"], torch::full({2}, 5.0)));
  EXPECT_TRUE(torch::equal(net.first->bias, source.tensor("weights/first.bias")));
}

TEST(ModuleWeights, OtherShapesAreAnErrorInAnyCase) {
  for (const char* path : {"weights/fixed", "buffers/norm.running_var", "weights/scale"}) {
    NetSource source;
    source.add(path, torch::ones({1}));
    WeightsNet net;
    const auto before = values_of(net);
    for (const bool strict : {true, false}) {
      EXPECT_THAT([&] { load_module(source, net, strict); },
                  ThrowsMessage<UsageError>(AllOf(HasSubstr(path), HasSubstr("[1]"))));
    }
    expect_unchanged(net, before);
  }
}

TEST(ModuleWeights, ManyDifferencesAreCounted) {
  MemorySource source;
  WeightsNet net;
  EXPECT_THAT([&] { load_module(source, net); },
              ThrowsMessage<UsageError>(AllOf(HasSubstr("9 missing in the checkpoint"), HasSubstr("and 1 more"))));
}

TEST(ModuleWeights, ParametersWithoutElements) {
  NetSource source;
  WeightsNet net;
  net.register_parameter("none", torch::empty({0, 3}));
  load_module(source, net);
  source.add("weights/none", torch::empty({0, 3}));
  load_module(source, net);
  source.add("weights/none", torch::empty({0, 4}));
  EXPECT_THROW(load_module(source, net), UsageError);
}

// Without running statistics it has buffers that are no tensors.
TEST(ModuleWeights, BuffersThatAreNotThere) {
  torch::nn::BatchNorm1d norm(torch::nn::BatchNorm1dOptions(2).track_running_stats(false));
  MemorySource source;
  source.add("weights/weight", torch::tensor({1.0, 2.0}));
  source.add("weights/bias", torch::tensor({3.0, 4.0}));
  load_module(source, *norm);
  EXPECT_TRUE(torch::equal(norm->bias, torch::tensor({3.0, 4.0})));
}

TEST(ModuleWeights, DamageIsPassedOn) {
  NetSource source;
  source.damage("weights/norm.bias");
  WeightsNet net;
  EXPECT_THAT([&] { load_module(source, net); }, ThrowsMessage<IoError>(HasSubstr("weights/norm.bias")));
}

}  // namespace
}  // namespace ds::checkpoint
