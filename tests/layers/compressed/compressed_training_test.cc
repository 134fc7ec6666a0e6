// Training with compressed layers: the engine against a plain loop that states the formulas, on ranks and stages.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>

#include "core/check.h"
#include "core/random_streams.h"
#include "dsengine/activation_checkpoint.h"
#include "dsengine/model_compression.h"
#include "tests/model/small_run.h"
#include "tests/support/autocast_scope.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thread_ranks.h"
#include "tests/support/thrown.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using test::run_ranks;
using testing::HasSubstr;

constexpr int kSteps = 8;
constexpr uint64_t kSeed = 1234;

// All kinds of layers: [4, 6] -> a loss.
struct MixedNetImpl : torch::nn::Module {
  MixedNetImpl() {
    places = register_module("places", torch::nn::Embedding(4, 12));
    first = register_module("first", torch::nn::Linear(6, 12));
    query = register_module("query", torch::nn::Linear(12, 12));
    output = register_module("output", torch::nn::Linear(12, 12));
    conv = register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 4, 3).padding(1)));
    last = register_module("last", torch::nn::Linear(48, 3));
    to(torch::kDouble);
    fill(*this);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor index = torch::arange(x.size(0));
    at::Tensor h = torch::tanh(first(x) + places(index));
    h = h + torch::tanh(output(query(h)));
    return last(torch::tanh(conv(h.view({-1, 1, 3, 4}))).flatten(1));
  }
  at::Tensor loss(const at::Tensor& input) {
    const at::Tensor x = input.to(first->weight.scalar_type());
    return (forward(x) - x.narrow(1, 0, 3).sin() * 3.0).pow(2).mean();
  }
  torch::nn::Embedding places{nullptr};
  torch::nn::Linear first{nullptr}, query{nullptr}, output{nullptr};
  torch::nn::Conv2d conv{nullptr};
  torch::nn::Linear last{nullptr};
};
TORCH_MODULE(MixedNet);

ordered_json method(const ordered_json& shared, const ordered_json& params, const std::vector<std::string>& modules) {
  ordered_json all = {{"enabled", true}, {"schedule_offset", 0}};
  if (!shared.is_null()) all.update(shared);
  ordered_json result;
  result["shared_parameters"] = all;
  result["different_groups"]["g"] = {{"params", params}, {"modules", modules}};
  return result;
}

ordered_json all_methods() {
  ordered_json section;
  section["weight_quantization"] =
      method({{"quantize_groups", 6}, {"rounding", "stochastic"}},
             {{"start_bits", 6}, {"target_bits", 4}, {"quantization_period", 2}}, {"^first$", "^places$"});
  section["activation_quantization"] =
      method({{"range_calibration", "static"}, {"schedule_offset", 2}, {"quantization_type", "asymmetric"}},
             {{"bits", 8}}, {"last"});
  section["sparse_pruning"] = method({{"method", "topk"}}, {{"dense_ratio", 0.4}}, {"query"});
  section["row_pruning"] = method({{"method", "l1"}, {"schedule_offset", 2}}, {{"dense_ratio", 0.6}}, {"first"});
  section["head_pruning"] = method({{"method", "topk"}, {"num_heads", 3}}, {{"dense_ratio", 0.6}}, {"output"});
  section["channel_pruning"] = method({{"method", "topk"}}, {{"dense_ratio", 0.7}}, {"conv"});
  return section;
}

ordered_json config_of(int stage, int accumulation) {
  ordered_json config = small_config(stage, accumulation);
  config["log_level"] = "warning";
  config["seed"] = kSeed;
  config["compression_training"] = all_methods();
  return config;
}

// --- the formulas by themselves -------------------------------------------------------------------------------------
at::Tensor pass(const at::Tensor& source, const at::Tensor& values) { return source + (values - source).detach(); }

at::Tensor mask_of(const at::Tensor& scores, double ratio) {
  const auto order = std::get<1>(scores.detach().flatten().sort(/*stable=*/true, 0, true));
  const auto kept = static_cast<int64_t>(std::ceil(ratio * static_cast<double>(scores.numel())));
  at::Tensor mask = torch::zeros({scores.numel()}, torch::kDouble);
  for (int64_t i = 0; i < kept; ++i) mask[order[i].item<int64_t>()] = 1.0;
  return mask.view(scores.sizes());
}

class PlainRun {
 public:
  // The start values of a prepared module, scores with them.
  explicit PlainRun(const torch::nn::Module& prepared) {
    for (const auto& item : prepared.named_parameters()) {
      values_[item.key()] = item.value().detach().clone().set_requires_grad(true);
    }
  }
  std::vector<at::Tensor> parameters() const {
    std::vector<at::Tensor> result;
    for (const auto& [name, value] : values_) result.push_back(value);
    return result;
  }
  at::Tensor loss(const at::Tensor& input) {
    const at::Tensor x = input.to(torch::kDouble);
    at::Tensor rows = torch::ones({12}, torch::kDouble);
    if (step >= 2) rows = row_mask();
    at::Tensor h = torch::tanh(torch::linear(x, weight_of("first", 6) * rows.view({-1, 1}), at("first.bias") * rows) +
                               torch::embedding(weight_of("places", 4), torch::arange(4)));
    const at::Tensor& sparse = at("query.compression.sparse_mask_scores");
    const at::Tensor query = at("query.weight") * pass(sparse, mask_of(sparse, 0.4));
    const at::Tensor& scores = at("output.compression.head_pruning_scores");
    const at::Tensor heads = pass(scores, mask_of(scores, 0.6)).view({3}).repeat_interleave(4);
    h = h + torch::tanh(torch::linear(torch::linear(h, query, at("query.bias")), at("output.weight") * heads,
                                      at("output.bias")));
    const at::Tensor& of_conv = at("conv.compression.channel_mask_scores");
    const at::Tensor channels = pass(of_conv, mask_of(of_conv, 0.7));
    h = torch::tanh(torch::conv2d(h.view({-1, 1, 3, 4}), at("conv.weight") * channels,
                                  at("conv.bias") * channels.view(-1), 1, 1))
            .flatten(1);
    return (torch::linear(input_of_last(h), at("last.weight"), at("last.bias")) - x.narrow(1, 0, 3).sin() * 3.0)
        .pow(2)
        .mean();
  }
  void end_step() {
    if (step >= 2 && seen_max > seen_min) {
      range_min = known ? range_min * 0.95F + seen_min * 0.05F : seen_min;
      range_max = known ? range_max * 0.95F + seen_max * 0.05F : seen_max;
      known = true;
    }
    seen_min = std::numeric_limits<float>::infinity();
    seen_max = -seen_min;
    ++step;
  }
  int64_t step = 0;

 private:
  const at::Tensor& at(const std::string& name) const { return values_.at(name); }
  at::Tensor row_mask() {
    if (!rows_.defined()) rows_ = mask_of(at("first.weight").detach().abs().sum(1), 0.6);
    return rows_;
  }
  // Symmetric, 6 bits down to 4, of `groups` parts; rounded with the draws of the step.
  at::Tensor weight_of(const std::string& layer, int64_t groups) {
    const at::Tensor& weight = at(layer + ".weight");
    const double half = step + 1 < 2 ? 32 : step + 1 < 4 ? 16 : 8;
    const std::string purpose = layer + " weight rounding";
    const RandomStream stream{.seed = kSeed, .step = step, .purpose = purpose};
    const at::Tensor draws = torch::rand(weight.sizes(), generator_of(stream), torch::kFloat) - 0.5;
    const at::Tensor x = weight.detach().reshape({groups, -1});
    const at::Tensor scale = std::get<0>(x.abs().max(1, true)) / half;
    const at::Tensor q = (x / scale + draws.view(x.sizes())).round().clamp(-half, half - 1) * scale;
    return pass(weight, q.view(weight.sizes()));
  }
  at::Tensor input_of_last(const at::Tensor& h) {
    if (step < 2) return h;
    seen_min = std::min(seen_min, h.min().item<float>());
    seen_max = std::max(seen_max, h.max().item<float>());
    if (!known) return h;
    const double scale = (static_cast<double>(range_max) - static_cast<double>(range_min)) / 256;
    const double zero = std::nearbyint(static_cast<double>(range_min) / scale) * scale;
    return pass(h, ((h.detach() - zero) / scale).round().clamp(0, 255) * scale + zero);
  }

  std::map<std::string, at::Tensor> values_;
  at::Tensor rows_;
  float seen_min = std::numeric_limits<float>::infinity();
  float seen_max = -std::numeric_limits<float>::infinity();
  float range_min = 0;
  float range_max = 0;
  bool known = false;
};

std::vector<double> plain_losses(int world, int accumulation) {
  MixedNet net;
  init_compression(*net, config_of(0, 1));
  PlainRun run(*net);
  torch::optim::AdamW optimizer(run.parameters(), torch::optim::AdamWOptions(0.02).weight_decay(0.1));
  std::vector<double> losses;
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    for (int64_t micro = step * accumulation; micro < (step + 1) * accumulation; ++micro) {
      double sum = 0;
      for (int rank = 0; rank < world; ++rank) {
        const at::Tensor loss = run.loss(sample(micro, rank));
        (loss / (accumulation * world)).backward();
        sum += loss.item<double>();
      }
      losses.push_back(sum / world);
    }
    optimizer.step();
    run.end_step();
  }
  return losses;
}

std::vector<double> engine_losses(Engine& engine, MixedNet& net, int64_t from, int64_t to) {
  std::vector<double> losses;
  for (int64_t micro = from; micro < to; ++micro) {
    const at::Tensor loss = net->loss(sample(micro, engine.global_rank()));
    engine.backward(loss);
    engine.step();
    at::Tensor mean = loss.detach().clone().view({1});
    engine.communicator().all_reduce(mean, comm::ReduceOp::kSum, "loss").wait();
    losses.push_back(mean.item<double>() / engine.dp_world_size());
  }
  return losses;
}

TEST(ModelCompression, TrainsAsTheFormulasSayOnRanksAndStages) {
  for (const int world : {1, 2, 4}) {
    for (const int accumulation : {1, 2}) {
      const std::vector<double> expected = plain_losses(world, accumulation);
      for (int stage = 0; stage <= 3; ++stage) {
        if (accumulation == 2 && world != 2) continue;
        run_ranks(world, [&](comm::Communicator& communicator) {
          MixedNet net;
          const auto parts = start(net.ptr(), config_of(stage, accumulation), communicator);
          const auto found = engine_losses(*parts.engine, net, 0, kSteps * accumulation);
          EXPECT_THAT(found, testing::Pointwise(testing::DoubleNear(1e-7), expected))
              << world << " ranks, stage " << stage << ", accumulation " << accumulation;
        });
      }
    }
  }
}

TEST(ModelCompression, AResumedRunGoesOnBitForBit) {
  for (const int stage : {1, 3}) {
    const test::ScratchFolder folder;
    run_ranks(2, [&](comm::Communicator& communicator) {
      MixedNet net;
      const auto parts = start(net.ptr(), config_of(stage, 1), communicator);
      engine_losses(*parts.engine, net, 0, 4);
      parts.engine->save_checkpoint(folder.path());
      const std::vector<double> expected = engine_losses(*parts.engine, net, 4, kSteps);
      MixedNet again;
      const auto resumed = start(again.ptr(), config_of(stage, 1), communicator);
      ASSERT_TRUE(static_cast<bool>(resumed.engine->load_checkpoint(folder.path())));
      EXPECT_EQ(engine_losses(*resumed.engine, again, 4, kSteps), expected) << "stage " << stage;
      // Back in time, in the same engine.
      ASSERT_TRUE(static_cast<bool>(parts.engine->load_checkpoint(folder.path())));
      EXPECT_EQ(engine_losses(*parts.engine, net, 4, kSteps), expected) << "stage " << stage;
    });
  }
}

TEST(ModelCompression, FloatsAgreeOverStagesToo) {
  std::vector<double> expected;
  for (int stage = 0; stage <= 3; ++stage) {
    run_ranks(2, [&](comm::Communicator& communicator) {
      MixedNet net;
      net->to(torch::kFloat);
      const auto parts = start(net.ptr(), config_of(stage, 1), communicator);
      const auto found = engine_losses(*parts.engine, net, 0, kSteps);
      if (stage == 0 && communicator.rank() == 0) expected = found;
      if (stage > 0) EXPECT_THAT(found, testing::Pointwise(testing::DoubleNear(5e-6), expected)) << "stage " << stage;
    });
  }
}

// Under autocast the weight is compressed first, and then cast.
TEST(ModelCompression, AutocastCastsWhatIsCompressed) {
  torch::nn::Linear layer(8, 4);
  ordered_json config;
  config["compression_training"]["weight_quantization"] =
      method({{"quantize_groups", 4}}, {{"start_bits", 4}, {"target_bits", 4}}, {"*"});
  init_compression(*layer, config);
  set_compression_step(*layer, 0);
  const at::Tensor input = torch::cos(torch::arange(16, torch::kFloat)).view({2, 8});
  const at::Tensor half = std::get<0>(layer->weight.detach().abs().max(1, true)) / 8;
  const at::Tensor q = (layer->weight.detach() / half).round().clamp(-8, 7) * half;
  EXPECT_TRUE(torch::allclose(layer(input), torch::linear(input, q, layer->bias)));
  {
    const torch::NoGradGuard no_grad;
    EXPECT_TRUE(torch::allclose(layer(input), torch::linear(input, q, layer->bias)));
  }
  {
    const torch::InferenceMode inference;
    EXPECT_TRUE(torch::allclose(layer->forward(input), torch::linear(input, q, layer->bias)));
  }
  at::Tensor found;
  {
    const test::AutocastScope autocast;
    found = layer(input);
  }
  EXPECT_EQ(found.scalar_type(), torch::kBFloat16);
  const at::Tensor expected =
      torch::linear(input.to(torch::kBFloat16), q.to(torch::kBFloat16), layer->bias.to(torch::kBFloat16));
  EXPECT_TRUE(torch::equal(found, expected));
}

// At whatever key an operator comes in: an input that is quantised twice with a range of its own would have been seen
// twice, and one with few levels shows it.
TEST(ModelCompression, InputsAreQuantisedOnce) {
  torch::nn::Linear layer(8, 4);
  layer->to(torch::kDouble);
  ordered_json config;
  config["compression_training"]["activation_quantization"] =
      method({{"quantization_type", "asymmetric"}, {"range_calibration", "dynamic"}}, {{"bits", 4}}, {"*"});
  init_compression(*layer, config);
  set_compression_step(*layer, 0);
  const at::Tensor rows = torch::cos(torch::arange(48, torch::kDouble)).view({2, 3, 8});
  const at::Tensor least = rows.amin(2, true);
  const at::Tensor scale = (rows.amax(2, true) - least) / 16;
  const at::Tensor zero = (least / scale).round() * scale;
  const at::Tensor quantised = ((rows - zero) / scale).round().clamp(0, 15) * scale + zero;
  const at::Tensor expected = torch::linear(quantised, layer->weight.detach().clone(), layer->bias);
  EXPECT_TRUE(torch::allclose(layer(rows), expected, 1e-12, 1e-12));        // matmul and add_
  EXPECT_TRUE(torch::allclose(layer(rows[1]), expected[1], 1e-12, 1e-12));  // addmm
  EXPECT_TRUE(torch::allclose(torch::linear(rows, layer->weight, layer->bias), expected, 1e-12, 1e-12));
}

TEST(ModelCompression, OtherLayersComputeAsBefore) {
  MixedNet net;
  const at::Tensor input = sample(0, 0);
  const at::Tensor before = net->loss(input);
  MixedNet compressed;
  init_compression(*compressed, config_of(0, 1));
  EXPECT_TRUE(torch::equal(net->loss(input), before));
  set_compression_step(*compressed, 0);
  EXPECT_FALSE(torch::equal(compressed->loss(input), before));
}

std::string message_of(const ordered_json& section) {
  return test::thrown_by<ConfigError>(
      [&] {
        MixedNet net;
        ordered_json config;
        config["compression_training"] = section;
        init_compression(*net, config);
      },
      "");
}

TEST(ModelCompression, WhatIsWrongIsNamedByItsPath) {
  ordered_json section;
  section["sparse_pruning"] = method({}, {{"dense_ratio", 0.5}}, {"nothing"});
  EXPECT_THAT(message_of(section), HasSubstr("compression_training.sparse_pruning.different_groups.g.modules: expected "
                                             "\"nothing\" to match a layer"));
  section["sparse_pruning"] = method({}, {{"dense_ratio", 1.5}}, {"query"});
  EXPECT_THAT(message_of(section),
              HasSubstr("compression_training.sparse_pruning.different_groups.g.params.dense_ratio"));
  section["sparse_pruning"] = method({}, {{"dense_ratio", 0.5}}, {"que(ry"});
  EXPECT_THAT(message_of(section), HasSubstr("expected a regular expression"));
  section.clear();
  section["weight_quantization"] = method({{"quantize_groups", 7}}, {{"start_bits", 8}, {"target_bits", 8}}, {"query"});
  EXPECT_THAT(message_of(section), HasSubstr("expected quantize_groups that divide the weight of query"));
  section["weight_quantization"] =
      method({{"quantization_type", "asymmetric"}}, {{"start_bits", 8}, {"target_bits", 2}}, {"query"});
  EXPECT_THAT(message_of(section), HasSubstr("expected at least 3 with asymmetric"));
  section["weight_quantization"] = method({}, {{"start_bits", 8}, {"target_bits", 8}}, {"query", "que"});
  EXPECT_THAT(message_of(section), HasSubstr("expected each layer in one group of the method, found query"));
  section.clear();
  section["head_pruning"] = method({{"num_heads", 5}}, {{"dense_ratio", 0.5}}, {"output"});
  EXPECT_THAT(message_of(section), HasSubstr("expected num_heads that divide the inputs of output, 12, found 5"));
}

TEST(ModelCompression, LayerReductionNeedsItsTeacherBefore) {
  run_ranks(1, [&](comm::Communicator& communicator) {
    ordered_json config = small_config(0, 1);
    config["compression_training"]["layer_reduction"] = {
        {"enabled", true}, {"module_name_prefix", "h"}, {"teacher_layer", {1}}};
    MixedNet net;
    try {
      start(net.ptr(), config, communicator);
      FAIL() << "expected a ConfigError";
    } catch (const ConfigError& error) {
      EXPECT_THAT(error.what(), HasSubstr("call engine::init_compression(*model, config, teacher) before"));
    }
  });
}

}  // namespace
}  // namespace ds::engine
