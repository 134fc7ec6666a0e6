// Sparse attention under the engine: the training of dense attention under the layout's mask, at every stage; with
// heads split over ranks each rank's part of the whole.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <vector>

#include "dsengine/activation_checkpoint.h"
#include "dsengine/efficiency.h"
#include "dsengine/errors.h"
#include "tests/model/small_run.h"
#include "tests/ops/same_training.h"
#include "tests/parallel/split_ranks.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using test::run_ranks;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr int64_t kAttentionHeads = 2;
constexpr int64_t kAttentionChannels = 4;
constexpr int64_t kAttentionWidth = kAttentionHeads * kAttentionChannels;
constexpr int64_t kAttentionTokens = 12;  // of 24 numbers of a sample, two at a time

// Of all that a layout keeps, as a mask of elements [heads or 1, time, time].
at::Tensor mask_of(const ops::BlockLayout& layout) {
  return torch::tensor(std::vector<uint8_t>(layout.kept))
      .to(at::kBool)
      .view({layout.heads, layout.blocks, layout.blocks})
      .repeat_interleave(layout.block, 1)
      .repeat_interleave(layout.block, 2)
      .slice(1, 0, kAttentionTokens)
      .slice(2, 0, kAttentionTokens)
      .tril();
}

struct AttentionNet : torch::nn::Module {
  AttentionNet(bool with_mask, bool in_regions) : masked(with_mask), regions(in_regions) {
    read = register_module("read", torch::nn::Linear(2, kAttentionWidth));
    qkv = register_module("qkv", torch::nn::Linear(kAttentionWidth, 3 * kAttentionWidth));
    write = register_module("write", torch::nn::Linear(kAttentionWidth, 2));
    fill(*this);
  }

  at::Tensor mixed(const at::Tensor& x) {
    std::vector<at::Tensor> parts;
    for (const at::Tensor& part : qkv(x).split(kAttentionWidth, 2)) {
      parts.push_back(part.view({x.size(0), kAttentionTokens, kAttentionHeads, kAttentionChannels}).transpose(1, 2));
    }
    const at::Tensor out = masked ? at::scaled_dot_product_attention(parts[0], parts[1], parts[2],
                                                                     mask_of(*attend->layout(kAttentionTokens)))
                                  : (*attend)(parts[0], parts[1], parts[2]);
    return x + out.transpose(1, 2).reshape(x.sizes());
  }

  at::Tensor loss(const at::Tensor& input) {
    const at::Tensor x = input.view({-1, kAttentionTokens, 2}).to(read->weight.scalar_type());
    const auto body = [this](const at::Tensor& t) { return mixed(t); };
    const at::Tensor y = read(x);
    return (write(regions ? recompute::checkpoint(body, y) : body(y)).to(at::kFloat) - input.view(x.sizes()).cos())
        .pow(2)
        .mean();
  }

  bool masked, regions;
  std::shared_ptr<ops::SparseSelfAttention> attend;
  torch::nn::Linear read{nullptr}, qkv{nullptr}, write{nullptr};
};

ordered_json sparse_config(int stage) {
  ordered_json config = small_config(stage, 2);
  config["sparse_attention"] = {{"mode", "bigbird"},
                                {"block", 2},
                                {"different_layout_per_head", true},
                                {"num_random_blocks", 1},
                                {"num_sliding_window_blocks", 1},
                                {"attention", "unidirectional"}};
  config["optimizer"] = {{"type", "SGD"}, {"params", {{"lr", 0.05}, {"momentum", 0.9}}}};
  config["zero_allow_untested_optimizer"] = true;
  return config;
}

TrainedRun train(const ordered_json& config, comm::Communicator& communicator, bool masked, bool regions) {
  const auto model = std::make_shared<AttentionNet>(masked, regions);
  const auto engine = ds::engine::start(model, config, communicator).engine;
  model->attend = sparse_self_attention(engine, kAttentionHeads);
  return record_training(*engine, 8, [&](int64_t micro) { return model->loss(sample(micro, communicator.rank())); });
}

TEST(SparseAttentionInTheEngine, EveryStageTrainsAsDenseAttentionUnderTheMask) {
  for (const int stage : {0, 1, 2, 3}) {
    for (const bool regions : {false, true}) {
      SCOPED_TRACE(cat("stage ", stage, regions ? ", in regions" : ""));
      run_ranks(2, [&](comm::Communicator& communicator) {
        const TrainedRun dense = train(sparse_config(stage), communicator, true, regions);
        expect_same_training(train(sparse_config(stage), communicator, false, regions), dense, 2e-6);
      });
    }
  }
}

TEST(SparseAttentionInTheEngine, BFloat16) {
  run_ranks(2, [&](comm::Communicator& communicator) {
    ordered_json config = sparse_config(2);
    config["bf16"] = {{"enabled", true}};
    const TrainedRun dense = train(config, communicator, true, false);
    expect_same_training(train(config, communicator, false, false), dense, 3e-2);
  });
}

TEST(SparseAttentionInTheEngine, IsAskedForOrRefused) {
  run_ranks(1, [&](comm::Communicator& communicator) {
    const auto model = std::make_shared<AttentionNet>(false, false);
    const auto engine = ds::engine::start(model, sparse_config(1), communicator).engine;
    model->attend = std::make_shared<ops::SparseSelfAttention>(ops::SparseSelfAttention::dense(kAttentionHeads));
    for (int64_t micro = 0; micro < 2; ++micro) {
      engine->backward(model->loss(sample(micro, 0)));
      if (micro == 0) engine->step();
    }
    EXPECT_THAT([&] { engine->step(); },
                ThrowsMessage<UsageError>(HasSubstr("engine::sparse_self_attention(engine, heads)")));
  });
}

TEST(SparseAttentionInTheEngine, WithoutASectionItIsDense) {
  run_ranks(1, [&](comm::Communicator& communicator) {
    const auto model = std::make_shared<AttentionNet>(false, false);
    const auto engine = ds::engine::start(model, small_config(0, 1), communicator).engine;
    EXPECT_FALSE(sparse_self_attention(engine, kAttentionHeads)->pattern().has_value());
  });
}

TEST(SparseAttentionOverRanks, HeadsHaveTheirLayouts) {
  const ops::SparsityPattern pattern{.mode = ops::SparsityMode::kFixed,
                                     .block = 2,
                                     .different_layout_per_head = true,
                                     .unidirectional = true,
                                     .num_different_global_patterns = 4};
  const ops::SparseSelfAttention attend(pattern, 4, 3);
  const auto value = [](double phase) {
    return at::sin(at::arange(2 * 4 * 20 * 3, at::kDouble) * 1.7 + phase).view({2, 4, 20, 3});
  };
  const ops::SparseAttentionOptions options{
      .key_padding_mask = value(0.7).view({-1}).slice(0, 0, 40).view({2, 20}).gt(-0.8),
      .key_padding_mask_mode = ops::MaskMode::kMultiply,
      .attention_mask = at::sin(at::arange(2 * 4 * 20 * 20, at::kDouble)).view({2, 4, 20, 20}),
      .attention_mask_mode = ops::MaskMode::kAdd};
  std::vector<at::Tensor> whole;
  for (const double phase : {0.1, 1.2, 2.3}) whole.push_back(value(phase).requires_grad_(true));
  const at::Tensor expected = attend(whole[0], whole[1], whole[2], options);
  const std::vector<at::Tensor> gradients = torch::autograd::grad({(expected * value(0.4)).sum()}, whole);
  for (const int64_t dim : {0, 1}) {
    run_ranks(2, [&](comm::Communicator& communicator) {
      const auto axis = parallel::make_axis(parallel::shared(communicator));
      std::vector<at::Tensor> leaves;
      std::vector<at::Tensor> split;
      for (const at::Tensor& tensor : whole) {
        leaves.push_back(tensor.detach().clone().requires_grad_(true));
        split.push_back(parallel::split_as(leaves.back(), axis, {.dim = dim}));
      }
      const at::Tensor found = attend(split[0], split[1], split[2], options);
      EXPECT_TRUE(is_split(found));
      const at::Tensor joined = parallel::whole_of(found);
      EXPECT_LE(parallel::relative_error(joined, expected), 1e-13) << "dimension " << dim;
      const std::vector<at::Tensor> own = torch::autograd::grad({(joined * value(0.4)).sum()}, leaves);
      for (size_t i = 0; i < 3; ++i) EXPECT_LE(parallel::relative_error(own[i], gradients[i]), 1e-12) << i;
      EXPECT_THAT([&] { attend(split[0], leaves[1], leaves[2]); },
                  ThrowsMessage<UsageError>(HasSubstr("all split over ranks, or none")));
      // What would fit this rank's part alone.
      if (dim == 1) {
        EXPECT_THAT(
            [&] {
              attend(split[0], split[1], split[2], {.attention_mask = at::zeros({2, 2, 20, 20})});
            },
            ThrowsMessage<UsageError>(HasSubstr("[2, 4, 20, 20]")));
      } else {
        EXPECT_THAT(
            [&] {
              attend(split[0], split[1], split[2], {.key_padding_mask = at::zeros({1, 20})});
            },
            ThrowsMessage<UsageError>(HasSubstr("[batch, time] = [2, 20]")));
      }
      ops::BlockLayout cut_short = *attend.layout(20);
      cut_short.kept.resize(cut_short.kept.size() / 2);
      EXPECT_THAT([&] { ops::sparse_attention(split[0], split[1], split[2], cut_short); },
                  ThrowsMessage<UsageError>(HasSubstr("numbers, found")));
    });
  }
}

TEST(SparseAttentionOverRanks, ARankMayHaveNothing) {
  const ops::SparseSelfAttention attend({.block = 2}, 2, 3);
  const at::Tensor whole = at::sin(at::arange(1 * 2 * 8 * 3, at::kDouble) * 1.7).view({1, 2, 8, 3});
  const at::Tensor expected = attend(whole, whole, whole);
  run_ranks(2, [&](comm::Communicator& communicator) {
    const auto axis = parallel::make_axis(parallel::shared(communicator));
    const at::Tensor split = parallel::split_as(whole, axis, {.dim = 0});
    const at::Tensor joined = parallel::whole_of(attend(split, split, split));
    EXPECT_LE(parallel::relative_error(joined, expected), 1e-13);
  });
}

}  // namespace
}  // namespace ds::engine
