#include "dsengine/pipeline.h"
#include "pipeline/stage_placement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <thread>

#include "core/check.h"
#include "pipeline/whole_names.h"
#include "tests/support/thread_ranks.h"

namespace ds::pipeline {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::ThrowsMessage;

at::Tensor error_of(const at::Tensor& output, const at::Tensor& label) { return (output - label).pow(2).mean(); }

LayerSpec linear(int64_t in, int64_t out) { return LayerSpec::of<torch::nn::Linear>(in, out); }

// A module of parameters that it is given.
struct OwnTensors : torch::nn::Module {
  Tensors forward(const Tensors& inputs) { return inputs; }
};

std::vector<std::string> names_of(const torch::nn::Module& module) {
  std::vector<std::string> names;
  for (const auto& item : module.named_parameters()) names.push_back(item.key());
  return names;
}

std::unique_ptr<PipelineModule> built(std::vector<LayerSpec> layers, const StagePlacement& placement,
                                      PipelineOptions options = {.loss = error_of}) {
  auto module = std::make_unique<PipelineModule>(std::move(layers), std::move(options));
  module->build(placement);
  return module;
}

TEST(PipelineModule, BuildsTheOwnStageOnly) {
  int made = 0;
  const auto counted = [&made](int64_t width) {
    return LayerSpec::made_by([&made, width] {
      ++made;
      return std::make_shared<torch::nn::LinearImpl>(width, width);
    });
  };
  const auto module =
      built({counted(3), counted(4), counted(5), counted(6)}, {.rank = 1, .rank_of = {0, 1}, .partition = "uniform"});
  EXPECT_EQ(made, 2);
  EXPECT_THAT(module->bounds(), ElementsAre(0, 2, 4));
  EXPECT_THAT(names_of(*module), ElementsAre("2.weight", "2.bias", "3.weight", "3.bias"));
  EXPECT_EQ(module->describe(1), "layers 2 (torch::nn::Linear) to 3 (torch::nn::Linear)");
  EXPECT_TRUE(module->is_elsewhere("0.weight"));
  EXPECT_FALSE(module->is_elsewhere("3.weight"));
}

TEST(PipelineModule, NamesMayBePathsOfSubmodules) {
  const auto module =
      built({linear(2, 3).named("h.0.mlp"), linear(3, 3).named("h.0.out"), linear(3, 2).named("head")}, {});
  EXPECT_THAT(names_of(*module), ElementsAre("h.0.mlp.weight", "h.0.mlp.bias", "h.0.out.weight", "h.0.out.bias",
                                             "head.weight", "head.bias"));
}

TEST(PipelineModule, ARankOfSeveralStagesHasThemAll) {
  const auto module = built({linear(2, 2), linear(2, 2), linear(2, 2), linear(2, 2)},
                            {.rank = 0, .rank_of = {0, 1, 1, 0}, .partition = "uniform"});
  EXPECT_THAT(names_of(*module), ElementsAre("0.weight", "0.bias", "3.weight", "3.bias"));
  EXPECT_EQ(module->parameters_of(3).size(), 2U);
  EXPECT_THAT(module->parameters_of(1), IsEmpty());
}

TEST(PipelineModule, LayersOfOneKeyOnARankAreOneModule) {
  const auto tied = [] { return LayerSpec::tied<torch::nn::Linear>("shared", 2, 2); };
  const auto module = built({tied(), linear(2, 2), tied()}, {});
  EXPECT_THAT(names_of(*module), ElementsAre("shared.weight", "shared.bias", "1.weight", "1.bias"));
  EXPECT_THAT(module->tied(), IsEmpty()) << "on one rank there is nothing to add";
  const auto parted = built({tied(), linear(2, 2), tied()}, {.rank = 1, .rank_of = {0, 1}, .partition = "uniform"});
  EXPECT_THAT(names_of(*parted), ElementsAre("shared.weight", "shared.bias"));
  ASSERT_EQ(parted->tied().size(), 1U);
  EXPECT_EQ(parted->tied()[0].key, "shared");
  EXPECT_THAT(parted->tied()[0].ranks, ElementsAre(0, 1));
  EXPECT_EQ(parted->tied_parameters("shared").size(), 2U);
}

// A layer whose tensors have names of their own; `made` counts how often it is built.
LayerSpec whole_named(const std::string& name, const WholeNames& tensors, int& made) {
  LayerSpec spec = LayerSpec::made_by([tensors, &made] {
                     ++made;
                     auto module = std::make_shared<OwnTensors>();
                     for (const WholeTensor& tensor : tensors) {
                       module->register_parameter(tensor.names.front(), torch::ones(tensor.trained));
                     }
                     return module;
                   }).named(name);
  spec.call = CallWithWholeNames(tensors, spec.call);
  return spec;
}

// The name "b" stands for the tensor that is tied, whichever of its names a layer reads. No layer is built to be
// counted: 9 elements against 3 + 3.
TEST(PipelineModule, ATensorOfSeveralNamesIsOneTieAndCountedUnbuilt) {
  int made = 0;
  const WholeTensor shared{.names = {"b", "a"}, .trained = 3};
  const auto module =
      built({whole_named("first", {shared, {.names = {"c"}, .trained = 6}}, made),
             whole_named("middle", {{.names = {"d"}, .trained = 3}}, made), whole_named("last", {shared}, made)},
            {.rank = 1, .rank_of = {0, 1}, .partition = "parameters"});
  EXPECT_THAT(module->bounds(), ElementsAre(0, 1, 3));
  EXPECT_EQ(made, 2);
  ASSERT_EQ(module->tied().size(), 1U);
  EXPECT_EQ(module->tied()[0].key, "b");
  EXPECT_THAT(module->tied()[0].names, ElementsAre("b", "a"));
  EXPECT_THAT(module->tied()[0].ranks, ElementsAre(0, 1));
  ASSERT_EQ(module->tied_parameters("b").size(), 1U);
  EXPECT_TRUE(module->tied_parameters("b")[0].is_same(module->named_parameters()["a"]));
}

TEST(PipelineModule, SeededLayersDoNotDependOnTheStages) {
  const auto layers = [] { return std::vector<LayerSpec>{linear(3, 3), linear(3, 3), linear(3, 3)}; };
  const auto whole = built(layers(), {.seed_layers = true});
  const auto last = built(layers(), {.rank = 1, .rank_of = {0, 1}, .partition = "uniform", .seed_layers = true});
  EXPECT_TRUE(torch::equal(whole->named_parameters()["2.weight"], last->named_parameters()["2.weight"]));
  EXPECT_FALSE(torch::equal(whole->named_parameters()["0.weight"], whole->named_parameters()["2.weight"]));
}

TEST(PipelineModule, PartitionsAreTheSameOnAllRanks) {
  const auto layers = [] {
    return std::vector<LayerSpec>{linear(2, 40), linear(40, 2), linear(2, 2), linear(2, 2),
                                  LayerSpec::function([](const at::Tensor& x) { return x.sigmoid(); })};
  };
  for (const std::string method : {"parameters", "type:linear", "profile"}) {
    std::vector<StageBounds> bounds(2);
    test::run_ranks(2, [&](comm::Communicator& ranks) {
      const at::Tensor before = at::detail::getDefaultCPUGenerator().get_state();
      PipelineOptions options{.loss = error_of, .profile_inputs = {torch::ones({4, 2})}};
      PipelineModule module(layers(), std::move(options));
      module.build({.rank = ranks.rank(), .rank_of = {0, 1}, .ranks = &ranks, .partition = method});
      bounds[static_cast<size_t>(ranks.rank())] = module.bounds();
    });
    EXPECT_EQ(bounds[0], bounds[1]) << method;
    if (method == "parameters") {
      EXPECT_THAT(bounds[0], ElementsAre(0, 1, 5));  // 120 against 82 + 6 + 6
    }
    if (method == "type:linear") {
      EXPECT_THAT(bounds[0], ElementsAre(0, 2, 5));
    }
  }
}

// Two pipelines of two ranks, where each would find another layer slow.
TEST(PipelineModule, AllPipelinesTakeOneRanksMeasurements) {
  std::vector<StageBounds> bounds(4);
  std::vector<int> made(4);
  test::run_ranks(4, [&](comm::Communicator& world) {
    const auto place = static_cast<size_t>(world.rank());
    const int replica = world.rank() % 2;
    const auto even = world.new_group({0, 2}, "pipeline 0");
    const auto odd = world.new_group({1, 3}, "pipeline 1");
    comm::Communicator& ranks = replica == 0 ? *even : *odd;
    std::vector<LayerSpec> layers;
    for (int i = 0; i < 6; ++i) {
      layers.push_back(LayerSpec::made_by(
          [&made, place] {
            ++made[place];
            return std::make_shared<torch::nn::LinearImpl>(2, 2);
          },
          [slow = i == 5 * replica](torch::nn::LinearImpl& linear, const at::Tensor& x) {
            if (slow) std::this_thread::sleep_for(std::chrono::milliseconds(30));
            return linear.forward(x);
          }));
    }
    PipelineModule module(layers, {.loss = error_of, .profile_inputs = {torch::ones({4, 2})}});
    module.build({.rank = ranks.rank(), .rank_of = {0, 1}, .ranks = &ranks, .world = &world, .partition = "profile"});
    bounds[place] = module.bounds();
    const auto stage = static_cast<size_t>(ranks.rank());
    made[place] -= module.bounds()[stage + 1] - module.bounds()[stage];
  });
  for (const StageBounds& of_rank : bounds) EXPECT_EQ(of_rank, bounds[0]);
  EXPECT_THAT(made, ElementsAre(6, 0, 0, 0)) << "beside their own layers";
}

TEST(PipelineModule, ALayerThatCannotBeWeighedIsAnErrorOfAllRanks) {
  for (const std::string method : {"profile", "parameters"}) {
    test::run_ranks(3, [&](comm::Communicator& ranks) {
      std::vector<LayerSpec> layers = {linear(2, 2), linear(2, 2), linear(2, 2), linear(2, 2)};
      layers.insert(layers.begin() + 3, LayerSpec::made_by([rank = ranks.rank()] {
                      require(rank != 0, "no such file");
                      return std::make_shared<torch::nn::LinearImpl>(2, 2);
                    }));
      PipelineModule module(layers, {.loss = error_of, .profile_inputs = {torch::ones({4, 2})}});
      const auto build = [&] {
        module.build({.rank = ranks.rank(), .rank_of = {0, 1, 2}, .ranks = &ranks, .partition = method});
      };
      if (ranks.rank() != 0) {
        EXPECT_THAT(build, ThrowsMessage<UsageError>(AllOf(HasSubstr(method), HasSubstr("on another rank"))));
      } else if (method == "profile") {
        EXPECT_THAT(build, ThrowsMessage<UsageError>(AllOf(HasSubstr("layer 3 "), HasSubstr("no such file"))));
      } else {
        EXPECT_THAT(build, ThrowsMessage<UsageError>(HasSubstr("no such file")));
      }
    });
  }
}

TEST(PipelineModule, LayersTakeAndGiveTuples) {
  const auto pair = [](const at::Tensor& x) { return std::make_tuple(x, std::make_pair(x * 2, Tensors{x * 3})); };
  const auto sum = [](const at::Tensor& a, const at::Tensor& b, const at::Tensor& c) { return a + b + c; };
  const auto module = built({linear(2, 2), LayerSpec::function(pair), LayerSpec::function(sum)}, {});
  const at::Tensor x = torch::ones({1, 2});
  const at::Tensor once = module->named_children()["0"]->as<torch::nn::Linear>()->forward(x);
  EXPECT_TRUE(torch::allclose(module->forward(x), once * 6));
}

TEST(PipelineModule, ModulesThatAreThereAlready) {
  torch::nn::Linear made(2, 3);
  const auto module = built({LayerSpec::module(made), LayerSpec::module(torch::nn::Linear(3, 2).ptr())}, {});
  EXPECT_TRUE(module->parameters()[0].is_same(made->weight));
  EXPECT_EQ(module->forward(torch::ones({1, 2})).size(1), 2);
}

TEST(PipelineModule, LayersOfOneModuleNeedAKey) {
  const torch::nn::Linear shared(2, 2);
  const auto make = [](std::vector<LayerSpec> layers) {
    return [layers = std::move(layers)] { PipelineModule(layers, {.loss = error_of}); };
  };
  const auto of = [&] { return LayerSpec::module(shared); };
  EXPECT_THAT(make({of(), linear(2, 2), of().named("again")}),
              ThrowsMessage<UsageError>(AllOf(HasSubstr("layers 0 (torch"), HasSubstr("and 2 (again, "),
                                              HasSubstr("one module"), HasSubstr(".tied_by(\"shared_0\")"))));
  EXPECT_THAT(make({of(), linear(2, 2), of().tied_by("k")}),
              ThrowsMessage<UsageError>(HasSubstr("Give both layers .tied_by(\"k\")")));
  EXPECT_THAT(make({of().tied_by("j"), of().tied_by("k")}), ThrowsMessage<UsageError>(HasSubstr(".tied_by(\"j\")")));
  struct Around : torch::nn::Module {
    explicit Around(torch::nn::Linear linear) { inner = register_module("inner", std::move(linear)); }
    at::Tensor forward(const at::Tensor& x) { return inner(x); }
    torch::nn::Linear inner{nullptr};
  };
  EXPECT_THAT(make({of(), LayerSpec::module(std::make_shared<Around>(shared))}),
              ThrowsMessage<UsageError>(AllOf(HasSubstr("share weights"), HasSubstr("layer of its own"))));
  // With a key, and where there is nothing to train.
  const auto tied = built({of().tied_by("k"), linear(2, 2), of().tied_by("k")}, {});
  EXPECT_THAT(names_of(*tied), ElementsAre("k.weight", "k.bias", "1.weight", "1.bias"));
  const torch::nn::ReLU relu;
  built({linear(2, 2), LayerSpec::module(relu), linear(2, 2), LayerSpec::module(relu)}, {});
}

TEST(PipelineModule, MistakesAreNamed) {
  const auto make = [](std::vector<LayerSpec> layers, LossFunction loss) {
    return [layers = std::move(layers), loss] { PipelineModule(layers, {.loss = loss}); };
  };
  EXPECT_THAT(make({}, error_of), ThrowsMessage<UsageError>(HasSubstr("expected layers")));
  EXPECT_THAT(make({linear(1, 1)}, {}), ThrowsMessage<UsageError>(HasSubstr("expected a loss")));
  EXPECT_THAT(make({linear(1, 1).named("a"), linear(1, 1).named("a")}, error_of),
              ThrowsMessage<UsageError>(AllOf(HasSubstr("layers 0 and 1"), HasSubstr("named a"))));
  EXPECT_THAT(make({LayerSpec::tied<torch::nn::Linear>("k", 1, 1),
                    LayerSpec::tied<torch::nn::LayerNorm>("k", torch::nn::LayerNormOptions({1}))},
                   error_of),
              ThrowsMessage<UsageError>(AllOf(HasSubstr("torch::nn::Linear"), HasSubstr("torch::nn::LayerNorm"))));
  EXPECT_THAT(make({LayerSpec::tied<torch::nn::Linear>("k", 1, 1),
                    LayerSpec::tied<torch::nn::Linear>("k", 1, 1).named("other")},
                   error_of),
              ThrowsMessage<UsageError>(AllOf(HasSubstr("key k"), HasSubstr("other"))));
  const auto two = [](const at::Tensor& a, const at::Tensor& b) { return a + b; };
  const auto module = built({linear(2, 2), LayerSpec::function(two)}, {});
  EXPECT_THAT(
      [&] {
        module->forward(torch::ones({1, 2}));
      },
      ThrowsMessage<UsageError>(
          AllOf(HasSubstr("stage 0, layer 1 "), HasSubstr("another number of tensors than the 1"))));
  EXPECT_THAT([&] { module->build({}); }, ThrowsMessage<UsageError>(HasSubstr("belongs to an engine already")));
  const auto part = built({linear(2, 2), linear(2, 2)}, {.rank = 1, .rank_of = {0, 1}, .partition = "uniform"});
  EXPECT_THAT(
      [&] {
        part->forward(torch::ones({1, 2}));
      },
      ThrowsMessage<UsageError>(AllOf(HasSubstr("layer 0 is on another rank"), HasSubstr("eval_batch"))));
  PipelineModule unbuilt({linear(2, 2), linear(2, 2)}, {.loss = error_of});
  EXPECT_THAT([&] { unbuilt.forward(torch::ones({1, 2})); }, ThrowsMessage<UsageError>(HasSubstr("initialize")));
  EXPECT_THAT(
      [&] {
        unbuilt.build({.rank_of = {0, 1}, .partition = "evenly"});
      },
      ThrowsMessage<ConfigError>(AllOf(HasSubstr("evenly"), HasSubstr("type:REGEX"))));
}

}  // namespace
}  // namespace ds::pipeline
