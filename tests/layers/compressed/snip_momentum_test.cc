// Pruning by |weight x gradient| with momentum: the engine against a plain loop that states the formulas.
#include "layers/compressed/snip_momentum.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "core/check.h"
#include "dsengine/model_compression.h"
#include "tests/model/small_run.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using model_compression::BlockSize;
using model_compression::Rule;
using nlohmann::ordered_json;
using test::run_ranks;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr int64_t kFirst = 2;
constexpr int64_t kLast = 6;
constexpr int64_t kStride = 2;
constexpr double kDense = 0.3;
constexpr int kSnipSteps = 9;

struct SnipNetImpl : torch::nn::Module {
  SnipNetImpl() {
    first = register_module("first", torch::nn::Linear(6, 12));
    middle = register_module("middle", torch::nn::Linear(12, 12));
    conv = register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(2, 4, 3).padding(1)));
    last = register_module("last", torch::nn::Linear(24, 3));
    fill(*this);
  }
  at::Tensor loss(const at::Tensor& input) {
    const at::Tensor x = input.to(first->weight.scalar_type());
    const at::Tensor h = torch::tanh(middle(torch::tanh(first(x))));
    const at::Tensor out = last(torch::tanh(conv(h.view({-1, 2, 2, 3}))).flatten(1));
    return (out - x.narrow(1, 0, 3).sin() * 3.0).pow(2).mean();
  }
  torch::nn::Linear first{nullptr}, middle{nullptr};
  torch::nn::Conv2d conv{nullptr};
  torch::nn::Linear last{nullptr};
};
TORCH_MODULE(SnipNet);

const std::vector<std::string>& pruned_layers() {
  static const std::vector<std::string> kNames = {"first.weight", "middle.weight", "conv.weight"};
  return kNames;
}

ordered_json snip_config(int stage, int accumulation, double clip = 0) {
  ordered_json config = small_config(stage, accumulation);
  config["log_level"] = "warning";
  if (clip > 0) config["gradient_clipping"] = clip;
  config["compression_training"]["sparse_pruning"]["shared_parameters"] = {{"enabled", true},
                                                                           {"method", "snip_momentum"},
                                                                           {"schedule_offset", kFirst},
                                                                           {"schedule_offset_end", kLast},
                                                                           {"schedule_offset_stride", kStride},
                                                                           {"block_pattern", "4x1"},
                                                                           {"dense_ratio", kDense},
                                                                           {"excluded_modules", {"last"}}};
  return config;
}

// --- the formulas by themselves, element by element -----------------------------------------------------------------
// Blocks of 4 x 1 of a weight as a matrix: of a Conv2d with height, width and input channel as columns.
at::Tensor matrix_of(const at::Tensor& weight) {
  return weight.dim() == 2 ? weight : weight.permute({0, 2, 3, 1}).contiguous().view({weight.size(0), -1});
}

struct ScoredBlock {
  std::string layer;
  int64_t row, column;  // of the first element
  double score = 0;
};

class PlainSnip {
 public:
  explicit PlainSnip(SnipNet& net) : net_(net) {
    for (const std::string& name : pruned_layers()) {
      const at::Tensor matrix = matrix_of(weight(name));
      masks_[name] = torch::ones_like(weight(name));
      for (int64_t row = 0; row < matrix.size(0); row += 4) {
        for (int64_t column = 0; column < matrix.size(1); ++column) blocks_.push_back({name, row, column});
      }
    }
  }
  void begin_step(int64_t step) {
    if (step != 4 && step != 6) return;
    const double share = std::pow(kDense, step == 4 ? 0.5 : 1.0);
    const auto kept = static_cast<size_t>(std::ceil(share * static_cast<double>(blocks_.size())));
    std::vector<ScoredBlock> ranked = blocks_;
    std::stable_sort(ranked.begin(), ranked.end(),
                     [](const ScoredBlock& a, const ScoredBlock& b) { return a.score > b.score; });
    for (const std::string& name : pruned_layers()) {
      at::Tensor matrix = torch::zeros_like(matrix_of(weight(name)));
      for (size_t i = 0; i < kept; ++i) {
        if (ranked[i].layer != name) continue;
        matrix.narrow(0, ranked[i].row, 4).select(1, ranked[i].column).fill_(1.0);
      }
      const auto sizes = weight(name).sizes();
      masks_[name] = sizes.size() == 2
                         ? matrix
                         : matrix.view({sizes[0], sizes[2], sizes[3], sizes[1]}).permute({0, 3, 1, 2}).contiguous();
    }
  }
  at::Tensor loss(const at::Tensor& x) {
    const at::Tensor h =
        torch::tanh(torch::linear(torch::tanh(torch::linear(x, masked("first.weight"), net_->first->bias)),
                                  masked("middle.weight"), net_->middle->bias));
    const at::Tensor image = torch::conv2d(h.view({-1, 2, 2, 3}), masked("conv.weight"), net_->conv->bias, 1, 1);
    return (net_->last(torch::tanh(image).flatten(1)) - x.narrow(1, 0, 3).sin() * 3.0).pow(2).mean();
  }
  void see_gradients() {
    const torch::NoGradGuard no_grad;
    for (ScoredBlock& block : blocks_) {
      const at::Tensor product = matrix_of(weight(block.layer) * weight(block.layer).grad());
      double mean = 0;
      for (int64_t row = block.row; row < block.row + 4; ++row) {
        mean += std::abs(product[row][block.column].item<double>()) / 4;
      }
      block.score = 0.9 * block.score + mean;
    }
  }
  const at::Tensor& mask(const std::string& name) const { return masks_.at(name); }

 private:
  at::Tensor weight(const std::string& name) { return *net_->named_parameters().find(name); }
  at::Tensor masked(const std::string& name) { return weight(name) * masks_.at(name); }

  SnipNet& net_;
  std::map<std::string, at::Tensor> masks_;
  std::vector<ScoredBlock> blocks_;
};

std::vector<double> plain_losses(int world, int accumulation, double clip, std::map<std::string, at::Tensor>* masks) {
  SnipNet net;
  PlainSnip plain(net);
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.02).weight_decay(0.1));
  std::vector<double> losses;
  for (int64_t step = 0; step < kSnipSteps; ++step) {
    plain.begin_step(step);
    optimizer.zero_grad();
    for (int64_t micro = step * accumulation; micro < (step + 1) * accumulation; ++micro) {
      double sum = 0;
      for (int rank = 0; rank < world; ++rank) {
        const at::Tensor loss = plain.loss(sample(micro, rank));
        (loss / static_cast<double>(accumulation * world)).backward();
        sum += loss.item<double>();
      }
      losses.push_back(sum / world);
    }
    plain.see_gradients();
    if (clip > 0) torch::nn::utils::clip_grad_norm_(net->parameters(), clip);
    optimizer.step();
  }
  for (const std::string& name : pruned_layers()) (*masks)[name] = plain.mask(name);
  return losses;
}

at::Tensor mask_buffer(SnipNet& model, const std::string& weight) {
  const std::string layer = weight.substr(0, weight.find('.'));
  return *model->named_buffers().find(layer + ".compression.sparse_pruning_mask");
}

std::vector<double> train_steps(Engine& engine, SnipNet& model, comm::Communicator& ranks, int from, int to) {
  const auto accumulation = static_cast<int64_t>(engine.gradient_accumulation_steps());
  std::vector<double> losses;
  for (int64_t micro = from * accumulation; micro < to * accumulation; ++micro) {
    const at::Tensor loss = model->loss(sample(micro, ranks.rank()));
    engine.backward(loss);
    engine.step();
    at::Tensor mean = loss.detach().to(at::kDouble).view({1});
    if (ranks.size() > 1) ranks.all_reduce(mean, comm::ReduceOp::kAvg).wait();
    losses.push_back(mean.item<double>());
  }
  return losses;
}

TEST(SnipMomentum, TrainsAsAPlainLoopThatStatesTheFormulas) {
  for (const int world : {1, 2, 4}) {
    for (const int stage : {0, 1, 2, 3}) {
      for (const double clip : {0.0, 0.5}) {
        const int accumulation = stage == 2 ? 2 : 1;
        SCOPED_TRACE(cat(world, " ranks, stage ", stage, ", clip ", clip));
        std::map<std::string, at::Tensor> masks;
        const std::vector<double> expected = plain_losses(world, accumulation, clip, &masks);
        run_ranks(world, [&](comm::Communicator& ranks) {
          SnipNet model;
          const auto engine = start(model.ptr(), snip_config(stage, accumulation, clip), ranks).engine;
          const std::vector<double> found = train_steps(*engine, model, ranks, 0, kSnipSteps);
          for (size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(found[i], expected[i], 5e-6) << "micro-batch " << i;
          for (const auto& [name, mask] : masks) {
            EXPECT_TRUE(mask_buffer(model, name).equal(mask.to(torch::kBool))) << name;
          }
        });
      }
    }
  }
}

TEST(SnipMomentum, GradientsOnTheHostChooseTheSameMasks) {
  std::map<std::string, at::Tensor> masks;
  const std::vector<double> expected = plain_losses(2, 1, 0.5, &masks);
  for (const ordered_json& offload :
       {ordered_json{{"device", "cpu"}}, ordered_json{{"device", "cpu"}, {"super_offload", true}}}) {
    ordered_json config = snip_config(2, 1, 0.5);
    config["zero_optimization"]["offload_optimizer"] = offload;
    run_ranks(2, [&](comm::Communicator& ranks) {
      SnipNet model;
      const auto engine = start(model.ptr(), config, ranks).engine;
      const std::vector<double> found = train_steps(*engine, model, ranks, 0, kSnipSteps);
      for (size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(found[i], expected[i], 5e-6) << "micro-batch " << i;
      for (const auto& [name, mask] : masks) EXPECT_TRUE(mask_buffer(model, name).equal(mask.to(torch::kBool))) << name;
    });
  }
}

// Between two changes of masks, with scores that are float32 beside 16-bit weights.
TEST(SnipMomentum, ResumesBitByBit) {
  for (const char* precision : {"fp32", "bf16"}) {
    for (const int stage : {1, 3}) {
      const test::ScratchFolder folder;
      ordered_json config = snip_config(stage, 1);
      if (precision == std::string("bf16")) config["bf16"]["enabled"] = true;
      run_ranks(2, [&](comm::Communicator& ranks) {
        SnipNet model;
        const auto engine = start(model.ptr(), config, ranks).engine;
        const at::Tensor scores = *model->named_buffers().find("first.compression.sparse_pruning_scores");
        EXPECT_EQ(scores.scalar_type(), at::kFloat);
        train_steps(*engine, model, ranks, 0, 5);
        engine->save_checkpoint(folder.path().string(), "tag");
        const std::vector<double> expected = train_steps(*engine, model, ranks, 5, kSnipSteps);
        SnipNet other;
        const auto resumed = start(other.ptr(), config, ranks).engine;
        resumed->load_checkpoint(folder.path().string(), "tag");
        EXPECT_EQ(train_steps(*resumed, other, ranks, 5, kSnipSteps), expected) << precision << stage;
        EXPECT_TRUE(mask_buffer(other, "conv.weight").equal(mask_buffer(model, "conv.weight")));
      });
    }
  }
}

TEST(SnipMomentum, AStepThatIsSkippedLeavesTheScores) {
  ordered_json config = snip_config(2, 1);
  config["fp16"] = {{"enabled", true}, {"initial_scale_power", 8}};
  run_ranks(2, [&](comm::Communicator& ranks) {
    SnipNet model;
    const auto engine = start(model.ptr(), config, ranks).engine;
    train_steps(*engine, model, ranks, 0, 2);
    const at::Tensor scores = *model->named_buffers().find("middle.compression.sparse_pruning_scores");
    const at::Tensor before = scores.clone();
    EXPECT_GT(before.sum().item<double>(), 0.0);
    const at::Tensor loss = model->loss(sample(2, ranks.rank()));
    engine->backward(ranks.rank() == 1 ? loss * std::numeric_limits<float>::infinity() : loss);
    engine->step();
    EXPECT_FALSE(engine->was_step_applied());
    EXPECT_TRUE(scores.equal(before));
  });
}

TEST(SnipMomentum, TheSmallModelHasZerosWhereBlocksLeft) {
  run_ranks(2, [&](comm::Communicator& ranks) {
    SnipNet model;
    const auto engine = start(model.ptr(), snip_config(3, 1), ranks).engine;
    train_steps(*engine, model, ranks, 0, kSnipSteps);
    const auto small = redundancy_clean(engine);
    int64_t stays = 0;
    int64_t all = 0;
    for (const auto& [name, values] : small) {
      EXPECT_EQ(name.find("compression"), std::string::npos) << name;
      if (std::find(pruned_layers().begin(), pruned_layers().end(), name) == pruned_layers().end()) continue;
      EXPECT_TRUE(values.ne(0).equal(mask_buffer(model, name))) << name;
      stays += values.ne(0).sum().item<int64_t>();
      all += values.numel();
    }
    EXPECT_EQ(stays, 4 * static_cast<int64_t>(std::ceil(kDense * static_cast<double>(all) / 4)));
  });
}

// As with fp16, whose scale is too large at first.
TEST(SnipMomentum, AChangeWaitsForTheFirstStepThatIsApplied) {
  ordered_json config = snip_config(0, 1);
  config["fp16"] = {{"enabled", true}, {"initial_scale_power", 24}, {"hysteresis", 1}};
  config["compression_training"]["sparse_pruning"]["shared_parameters"].update(
      {{"schedule_offset", 1}, {"schedule_offset_end", 1}});
  run_ranks(2, [&](comm::Communicator& ranks) {
    SnipNet model;
    const auto engine = start(model.ptr(), config, ranks).engine;
    const auto share = [&] {
      double kept = 0;
      double all = 0;
      for (const std::string& name : pruned_layers()) {
        kept += mask_buffer(model, name).sum().item<double>();
        all += static_cast<double>(mask_buffer(model, name).numel());
      }
      return kept / all;
    };
    int64_t step = 0;
    do {
      if (step == 1) EXPECT_FALSE(engine->was_step_applied());
      if (step >= 1) EXPECT_THROW(redundancy_clean(engine), UsageError);
      EXPECT_EQ(share(), 1);
      engine->backward(model->loss(sample(step, ranks.rank())));
      engine->step();
    } while (!engine->was_step_applied() && ++step < 30);
    EXPECT_GT(step, 0);
    EXPECT_TRUE(engine->was_step_applied());
    EXPECT_NEAR(share(), kDense, 0.05);
    EXPECT_NO_THROW(redundancy_clean(engine));
  });
}

TEST(SnipMomentum, NoLayerAtAllIsRefused) {
  ordered_json config = snip_config(0, 1);
  config["compression_training"]["sparse_pruning"]["shared_parameters"]["excluded_modules"] = {"."};
  run_ranks(1, [&](comm::Communicator& ranks) {
    SnipNet model;
    EXPECT_THAT([&] { start(model.ptr(), config, ranks); },
                ThrowsMessage<ConfigError>(HasSubstr("excluded_modules leaves")));
  });
}

TEST(SnipMomentum, ALayerThatBlocksDoNotDivideIsTold) {
  ordered_json config = snip_config(0, 1);
  config["compression_training"]["sparse_pruning"]["shared_parameters"]["excluded_modules"] = ordered_json::array();
  run_ranks(1, [&](comm::Communicator& ranks) {
    SnipNet model;
    ::testing::internal::CaptureStderr();
    const auto engine = start(model.ptr(), config, ranks).engine;
    EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr("last is not pruned: blocks of 4x1"));
  });
}

TEST(SnipMomentum, WithoutAnEngineAStepIsRefused) {
  SnipNet model;
  init_compression(*model, snip_config(0, 1));
  EXPECT_THAT([&] { set_compression_step(*model, 1); }, ThrowsMessage<UsageError>(HasSubstr("snip_momentum")));
  set_compression_step(*model, 100);  // a model that only computes
  EXPECT_TRUE(mask_buffer(model, "first.weight").all().item<bool>());
}

TEST(SnipMomentum, WhatIsNoScheduleIsRefusedByName) {
  const auto with = [](const ordered_json& changes) {
    ordered_json config = snip_config(0, 1);
    config["compression_training"]["sparse_pruning"]["shared_parameters"].update(changes);
    return config;
  };
  const auto refuses = [&](const ordered_json& changes, const char* message) {
    EXPECT_THAT([&] { config::parse(with(changes), {.dp_world_size = 1}); },
                ThrowsMessage<ConfigError>(HasSubstr(message)))
        << changes;
  };
  refuses({{"block_pattern", "4by1"}}, "expected rows x columns");
  refuses({{"block_pattern", "0x1"}}, "expected rows x columns");
  refuses({{"dense_ratio", 1}}, "expected less than 1");
  refuses({{"schedule_offset_stride", 0}}, "schedule_offset_stride");
  refuses({{"schedule_offset_end", 1}}, "expected at least schedule_offset");
  refuses({{"schedule_offset", 0}, {"schedule_offset_end", 0}}, "no gradient has been seen");
  EXPECT_NO_THROW(config::parse(with({{"block_pattern", "2x2"}}), {.dp_world_size = 1}));
}

TEST(SnipMomentum, TheShareThatStaysFallsByEqualFactors) {
  Rule rule;
  rule.schedule_offset = 10;
  rule.dense_ratio = 0.25;
  rule.snip = {.last = 31, .stride = 10, .block = {}};
  EXPECT_EQ(model_compression::snip_dense_ratio(rule, 9), std::nullopt);
  EXPECT_EQ(model_compression::snip_dense_ratio(rule, 10), std::nullopt);  // nothing leaves at the first
  EXPECT_DOUBLE_EQ(*model_compression::snip_dense_ratio(rule, 20), 0.5);
  EXPECT_EQ(model_compression::snip_dense_ratio(rule, 25), std::nullopt);
  EXPECT_DOUBLE_EQ(*model_compression::snip_dense_ratio(rule, 30), 0.25);
  EXPECT_EQ(model_compression::snip_dense_ratio(rule, 40), std::nullopt);
  EXPECT_EQ(model_compression::snip_due_ratio(rule, 19), std::nullopt);
  EXPECT_DOUBLE_EQ(*model_compression::snip_due_ratio(rule, 25), 0.5);
  EXPECT_DOUBLE_EQ(*model_compression::snip_due_ratio(rule, 99), 0.25);
  EXPECT_TRUE(model_compression::snip_counts(rule, 29));
  EXPECT_FALSE(model_compression::snip_counts(rule, 30));
  rule.snip->last = 10;
  EXPECT_DOUBLE_EQ(*model_compression::snip_dense_ratio(rule, 10), 0.25);  // all at once
  rule.schedule_offset = 1000;
  rule.snip->last = 1000;
  EXPECT_FALSE(model_compression::snip_counts(rule, 839));
  EXPECT_TRUE(model_compression::snip_counts(rule, 840));
}

TEST(SnipMomentum, NoLayerLosesAllItsBlocks) {
  const at::Tensor rich = torch::full({50, 2}, 5.0);
  const at::Tensor poor = torch::rand({100, 1});
  const auto masks = model_compression::best_blocks({rich, poor}, 0.3);
  EXPECT_EQ(masks[0].sum().item<int64_t>() + masks[1].sum().item<int64_t>(), 60);
  EXPECT_EQ(masks[1].sum().item<int64_t>(), 2);
  EXPECT_TRUE(poor.masked_select(masks[1]).min().ge(poor.masked_select(masks[1].logical_not()).max()).item<bool>());
  EXPECT_TRUE(masks[0].view({-1}).narrow(0, 0, 58).all().item<bool>());  // of equal ones the first
}

TEST(SnipMomentum, BlocksOfAConvolutionRunOverInputChannels) {
  const at::Tensor weight = torch::arange(2 * 4 * 3 * 3, torch::kDouble).view({2, 4, 3, 3});
  const BlockSize block = {.rows = 1, .columns = 4};  // all input channels of a place
  const at::Tensor means = model_compression::block_means(weight, block);
  ASSERT_EQ(means.sizes(), (std::vector<int64_t>{2, 9}));
  EXPECT_TRUE(means.view({2, 3, 3}).allclose(weight.mean(1)));
  const at::Tensor mask = means.gt(means.median());
  const at::Tensor elements = model_compression::elements_of_blocks(mask, block, weight.sizes());
  EXPECT_TRUE(elements.equal(mask.view({2, 1, 3, 3}).expand({2, 4, 3, 3})));
}

}  // namespace
}  // namespace ds::engine
