// What a prepared model keeps through casts, ties, parts and steps that did not happen, and what is refused by name
// since the small model would compute something else.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <utility>

#include "dsengine/activation_checkpoint.h"
#include "dsengine/checkpoint.h"
#include "dsengine/errors.h"
#include "dsengine/model_compression.h"
#include "tests/model/small_run.h"
#include "tests/recompute/chosen_modules.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thread_ranks.h"
#include "tests/support/thrown.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using test::run_ranks;
using testing::HasSubstr;

ordered_json with(const char* method, const ordered_json& shared, const ordered_json& params,
                  const std::vector<std::string>& modules, const ordered_json& related = nullptr) {
  ordered_json config = small_config(0, 1);
  config["log_level"] = "warning";
  ordered_json& section = config["compression_training"][method];
  section["shared_parameters"] = {{"enabled", true}, {"schedule_offset", 0}};
  section["shared_parameters"].update(shared);
  section["different_groups"]["g"] = {{"params", params}, {"modules", modules}};
  if (!related.is_null()) section["different_groups"]["g"]["related_modules"] = related;
  return config;
}
ordered_json four_bits(const std::vector<std::string>& modules, int groups = 1) {
  return with("weight_quantization", {{"quantize_groups", groups}}, {{"start_bits", 4}, {"target_bits", 4}}, modules);
}
ordered_json half_of_rows(const std::vector<std::string>& modules, const ordered_json& related = nullptr) {
  return with("row_pruning", {{"method", "l1"}}, {{"dense_ratio", 0.5}}, modules, related);
}
ordered_json static_inputs(const std::vector<std::string>& modules) {
  return with("activation_quantization", {{"range_calibration", "static"}, {"quantization_type", "asymmetric"}},
              {{"bits", 8}}, modules);
}

template <class Action>
std::string refusal(const Action& action) {
  return test::thrown_by<UsageError>(action, "nothing was refused");
}

at::Tensor rows_of(int64_t count, int64_t width) {
  return torch::cos(torch::arange(count * width, torch::kFloat) * 1.3).view({count, width});
}

struct PairImpl : torch::nn::Module {
  explicit PairImpl(int64_t between = 8, int64_t inputs_of_last = 8) {
    first = register_module("first", torch::nn::Linear(6, between));
    last = register_module("last", torch::nn::Linear(inputs_of_last, 3));
    fill(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return last(torch::tanh(first(x))); }
  torch::nn::Linear first{nullptr}, last{nullptr};
};
TORCH_MODULE(Pair);

TEST(PreparedModel, StaticRangesStayThroughCasts) {
  torch::nn::Linear layer(6, 3);
  init_compression(*layer, static_inputs({"*"}));
  set_compression_step(*layer, 0);
  const at::Tensor x = rows_of(4, 6);
  layer(x);
  set_compression_step(*layer, 1);
  const auto range = [&] { return layer->named_buffers()["compression.activation_range"].to(torch::kDouble).sum(0); };
  EXPECT_TRUE(torch::equal(range(), torch::stack({x.min(), x.max()}).to(torch::kDouble)));
  layer->to(torch::kDouble);
  EXPECT_TRUE(torch::equal(range(), torch::stack({x.min(), x.max()}).to(torch::kDouble)));
  layer->eval();
  const at::Tensor wide = x.to(torch::kDouble);
  const at::Tensor scale = (wide.max() - wide.min()) / 256;
  const at::Tensor zero = (wide.min() / scale).round() * scale;
  const at::Tensor q = ((wide - zero) / scale).round().clamp(0, 255) * scale + zero;
  const at::Tensor plain = torch::linear(q, layer->weight.detach().clone(), layer->bias.detach().clone());
  EXPECT_TRUE(torch::allclose(layer(wide), plain, 1e-9, 1e-9));
  layer->to(torch::kBFloat16);
  EXPECT_TRUE(torch::allclose(range(), torch::stack({wide.min(), wide.max()}), 1e-2));
  // Also in 16 bits a range moves by its small steps.
  layer->train();
  const double before = range()[1].item<double>();
  layer((wide * 1.01).to(torch::kBFloat16));
  set_compression_step(*layer, 2);
  const double moved = 0.95 * before + 0.05 * (wide * 1.01).to(torch::kBFloat16).max().item<double>();
  EXPECT_GT(range()[1].item<double>(), before);
  EXPECT_NEAR(range()[1].item<double>(), moved, 1e-5);
}

TEST(PreparedModel, IsNotClonedIntoOneWithPlainLayers) {
  torch::nn::Linear layer(6, 4);
  init_compression(*layer, four_bits({"*"}));
  EXPECT_THROW(layer->clone(), c10::Error);
  redundancy_clean(*layer);
  EXPECT_NO_THROW(layer->clone());
}

struct AllKindsImpl : torch::nn::Module {
  AllKindsImpl() {
    places = register_module("places", torch::nn::Embedding(8, 6));
    first = register_module("first", torch::nn::Linear(6, 8));
    last = register_module("last", torch::nn::Linear(8, 6));
    picture = register_module("picture", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 2, 3)));
    fill(*this);
  }
  at::Tensor forward(const at::Tensor& ids) {
    const at::Tensor hidden = torch::gelu(last(torch::gelu(first(torch::gelu(places(ids))))));
    return torch::gelu(picture(hidden.reshape({1, 1, -1, 6}))).pow(2).sum();
  }
  torch::nn::Embedding places{nullptr};
  torch::nn::Linear first{nullptr}, last{nullptr};
  torch::nn::Conv2d picture{nullptr};
};
TORCH_MODULE(AllKinds);

// Recorded operators run again on tensors by which no layer is known: what compressed layers give is kept, what
// follows them is dropped.
TEST(PreparedModel, InChosenModulesGradientsAreThoseWithout) {
  const at::Tensor ids = torch::arange(6);
  for (const ordered_json& config : {four_bits({"*"}), half_of_rows({"first"}), static_inputs({"first", "picture"})}) {
    AllKinds model;
    init_compression(*model, config);
    set_compression_step(*model, 0);
    model->forward(ids);
    set_compression_step(*model, 1);
    const double compressed = model->forward(ids).item<double>();
    for (const at::Tensor& input : {ids, ids.view({2, 3})}) {
      for (const ds::Recompute way : recompute::kBothWays) {
        const auto statistics = recompute::expect_same_step(
            *model, [](const std::string& name, const torch::nn::Module&) { return name.empty(); }, {.recompute = way},
            [&] { return model->forward(input); });
        EXPECT_GE(statistics.dropped_tensors, 2) << config.dump();
      }
    }
    AllKinds plain;
    EXPECT_NE(plain->forward(ids).item<double>(), compressed) << config.dump();
  }
}

struct HeadImpl : torch::nn::Module {
  explicit HeadImpl(const at::Tensor& shared) { weight = register_parameter("weight", shared); }
  at::Tensor weight;
};
TORCH_MODULE(Head);
struct TiedImpl : torch::nn::Module {
  TiedImpl() {
    places = register_module("places", torch::nn::Embedding(8, 4));
    head = register_module("head", Head(places->weight));
  }
  at::Tensor forward() { return torch::linear(places(torch::arange(8)), head->weight); }
  torch::nn::Embedding places{nullptr};
  Head head{nullptr};
};
TORCH_MODULE(Tied);

TEST(PreparedModel, ATiedWeightHasOneCompression) {
  const auto cleaned = [](const ordered_json& config) {
    Tied model;
    init_compression(*model, config);
    set_compression_step(*model, 0);
    const at::Tensor expected = model->forward().detach();
    redundancy_clean(*model);
    EXPECT_TRUE(torch::allclose(model->forward(), expected, 1e-5, 1e-6));
  };
  cleaned(four_bits({"*"}, 8));  // rows each, as those of the embedding
  EXPECT_THAT(refusal([&] { cleaned(four_bits({"*"}, 1)); }),
              HasSubstr("which are one tensor, found different values"));
  EXPECT_THAT(refusal([&] { cleaned(four_bits({"places"})); }), HasSubstr("places.weight"));
}

TEST(PreparedModel, ALayerThatNoOperatorCameToIsRefused) {
  Pair model;
  init_compression(*model, four_bits({"*"}));
  testing::internal::CaptureStderr();
  set_compression_step(*model, 0);
  model->first(rows_of(4, 6));
  set_compression_step(*model, 1);
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("embedding or conv2d got the weight of last, whose"));
  EXPECT_THAT(refusal([&] { redundancy_clean(*model); }), HasSubstr("expected last.weight to have been used"));
}

TEST(PreparedModel, IsTheModuleThatAnEngineGets) {
  run_ranks(1, [&](comm::Communicator& communicator) {
    Pair in_parts;
    init_compression(*in_parts->first, four_bits({"*"}));
    init_compression(*in_parts->last, four_bits({"*"}));
    EXPECT_THAT(refusal([&] { start(in_parts.ptr(), small_config(0, 1), communicator); }),
                HasSubstr("found first, which is prepared as a layer of another module"));
    EXPECT_THAT(refusal([&] { init_compression(*in_parts, four_bits({"*"})); }), HasSubstr("found first"));
    EXPECT_THAT(refusal([&] { set_compression_step(*in_parts, 1); }), HasSubstr("a part of it"));
    EXPECT_THAT(refusal([&] { redundancy_clean(*in_parts); }), HasSubstr("a part of it"));
    Pair whole;
    init_compression(*whole, four_bits({"*"}));
    EXPECT_THAT(refusal([&] { init_compression(*whole, four_bits({"*"})); }), HasSubstr("call it once"));
    EXPECT_THAT(refusal([&] { start(whole->first.ptr(), small_config(0, 1), communicator); }),
                HasSubstr("found the model, which is prepared"));
  });
}

// A product, and a bias that is added apart and not in place.
struct OwnLinearImpl : torch::nn::Module {
  OwnLinearImpl() {
    weight = register_parameter("weight", torch::empty({4, 6}));
    bias = register_parameter("bias", torch::empty({4}));
    fill(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return torch::matmul(x, weight.t()) + bias; }
  at::Tensor weight, bias;
};
TORCH_MODULE(OwnLinear);

TEST(PreparedModel, ABiasThatIsNotPrunedInTrainingIsRefused) {
  OwnLinear layer;
  init_compression(*layer, half_of_rows({"*"}));
  testing::internal::CaptureStderr();
  set_compression_step(*layer, 0);
  layer->forward(rows_of(4, 6));
  set_compression_step(*layer, 1);
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("no operator added the bias of the model, whose"));
  EXPECT_THAT(refusal([&] { redundancy_clean(*layer); }), HasSubstr("expected bias to have been pruned"));
}

TEST(PreparedModel, WhatIsNoBiasOfTheProductStaysAsItIs) {
  torch::nn::Linear layer(6, 4);
  fill(*layer);
  init_compression(*layer, half_of_rows({"*"}));
  set_compression_step(*layer, 0);
  const torch::NoGradGuard no_grad;
  const at::Tensor weight = layer->weight.detach().clone();
  const at::Tensor bias = layer->bias.detach().clone();
  const auto kept = std::get<1>(weight.abs().sum(1).sort(true, 0, true)).narrow(0, 0, 2);
  const at::Tensor mask = torch::zeros({4}).index_fill_(0, kept, 1.0);
  const at::Tensor x = rows_of(5, 6);
  const at::Tensor product = torch::matmul(x, (weight * mask.view({-1, 1})).t());
  EXPECT_TRUE(torch::allclose(layer(x), product + bias * mask));                                 // addmm
  EXPECT_TRUE(torch::allclose(layer(x.view({1, 5, 6})), (product + bias * mask).unsqueeze(0)));  // matmul, add_
  EXPECT_TRUE(torch::equal(torch::ones({5, 4}).add_(layer->bias), torch::ones({5, 4}) + bias));
  const at::Tensor residual = torch::full({5, 4}, 2.0);
  EXPECT_TRUE(torch::allclose(torch::addmm(residual, x, layer->weight.t()), residual + product));
  at::Tensor twice = torch::matmul(x, layer->weight.t());
  EXPECT_TRUE(torch::allclose(twice.add_(layer->bias, 2), product + 2 * bias));
}

TEST(PreparedModel, InputsThatAreNotTheRowsAreRefused) {
  Pair model(4, 8);
  init_compression(*model, half_of_rows({"first"}, {{"last"}}));
  set_compression_step(*model, 0);
  EXPECT_THAT(refusal([&] { redundancy_clean(*model); }), HasSubstr("to have an input for each of 4 outputs, found 8"));
}

TEST(PreparedModel, BeginsWithWeightsThatHaveNoScores) {
  const test::ScratchFolder folder;
  const std::string path = (folder.path() / "plain.safetensors").string();
  Pair plain;
  {
    const torch::NoGradGuard no_grad;
    for (auto& parameter : plain->parameters()) parameter.add_(0.25);
  }
  std::vector<std::pair<std::string, at::Tensor>> weights;
  for (const auto& item : plain->named_parameters()) weights.emplace_back(item.key(), item.value().detach());
  checkpoint::write_weights(path, weights);
  for (const int stage : {0, 3}) {
    run_ranks(2, [&](comm::Communicator& communicator) {
      ordered_json config = with("row_pruning", {{"method", "topk"}}, {{"dense_ratio", 0.5}}, {"first"});
      config["zero_optimization"] = small_config(stage, 1)["zero_optimization"];
      Pair model;
      const auto parts =
          initialize({.model = model.ptr(), .config = config, .weights = path, .communicator = borrowed(communicator)});
      const State found = copy_of(parts.engine->module_state_dict());
      EXPECT_TRUE(torch::equal(found.at("first.weight"), plain->first->weight));
      EXPECT_EQ(found.at("first.compression.row_mask_scores").numel(), 8);
    });
  }
}

TEST(PreparedModel, RangesMoveWithStepsAlone) {
  run_ranks(2, [&](comm::Communicator& communicator) {
    Pair model;
    const auto parts = start(model.ptr(), static_inputs({"first"}), communicator);
    const auto range = [&] {
      return copy_of(parts.engine->module_state_dict()).at("first.compression.activation_range");
    };
    const auto pass = [&](double times) {
      parts.engine->backward(model->forward(sample(0, communicator.rank()) * times).pow(2).mean());
    };
    pass(1);
    parts.engine->step();
    const at::Tensor after_one = range();
    EXPECT_GT(after_one.abs().max().item<float>(), 0);
    pass(100);
    parts.engine->zero_grad();
    EXPECT_TRUE(torch::equal(range(), after_one));
    pass(1);  // what the dropped pass saw is of no step
    parts.engine->step();
    EXPECT_TRUE(torch::allclose(range(), after_one));
  });
}

TEST(PreparedModel, ScoresWaitForTheirStepAndRecomputationIsNoOtherPass) {
  const auto losses_of = [](bool recomputed) {
    std::vector<double> losses;
    run_ranks(1, [&](comm::Communicator& communicator) {
      ordered_json config =
          with("sparse_pruning", {{"method", "topk"}, {"schedule_offset", 2}}, {{"dense_ratio", 0.3}}, {"first"});
      config["compression_training"].update(static_inputs({"last"})["compression_training"]);
      Pair model;
      Pair unpruned;
      const auto parts = start(model.ptr(), config, communicator);
      const auto forward = [&net = *model](const at::Tensor& x) { return net.forward(x); };
      for (int step = 0; step < 5; ++step) {
        const at::Tensor x = sample(step, 0);
        const at::Tensor y = recomputed ? recompute::checkpoint(forward, x) : forward(x);
        if (step == 0) EXPECT_TRUE(torch::equal(y, unpruned->forward(x)));
        const at::Tensor loss = (y - x.narrow(1, 0, 3)).pow(2).mean();
        parts.engine->backward(loss);
        parts.engine->step();
        losses.push_back(loss.item<double>());
      }
    });
    return losses;
  };
  const std::vector<double> expected = losses_of(false);
  EXPECT_EQ(losses_of(true), expected);
}

}  // namespace
}  // namespace ds::engine
