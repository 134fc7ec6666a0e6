// Ready layers: what torch::nn computes, whole and split, with heads that do not divide evenly too.
#include "dsengine/parallel_layers.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include "dsengine/device_mesh.h"
#include "dsengine/errors.h"
#include "tests/parallel/split_ranks.h"

namespace ds::parallel {
namespace {

using ::testing::HasSubstr;
using ::testing::SizeIs;

void copy_into(const at::Tensor& to, const at::Tensor& from) {
  const at::NoGradGuard no_grad;
  to.copy_(from);
}

void copy_linear(const ParallelLinearImpl& layer, const torch::nn::LinearImpl& plain) {
  copy_into(layer.weight, plain.weight);
  copy_into(layer.bias, plain.bias);
}

at::Tensor input_of(int64_t batch, int64_t time, int64_t hidden, at::ScalarType dtype = at::kFloat) {
  return at::arange(batch * time * hidden, dtype).mul(0.37).sin().view({batch, time, hidden});
}

// In float64: its terms cancel.
at::Tensor loss_of(const at::Tensor& y) {
  return (y * at::arange(y.numel(), y.options()).mul(0.11).cos().view(y.sizes())).sum() + y.pow(2).mean();
}
constexpr double kDoublePrecision = 1e-9;

template <class Layer, class Options>
std::shared_ptr<Layer> in_float64(const Options& options) {
  auto layer = std::make_shared<Layer>(options);
  layer->to(at::kDouble);
  return layer;
}

TEST(ParallelLayers, LinearAndEmbeddingStartAndComputeAsTorchs) {
  for (const bool bias : {true, false}) {
    torch::manual_seed(3);
    torch::nn::Linear plain(torch::nn::LinearOptions(12, 20).bias(bias));
    torch::manual_seed(3);
    const ColumnParallelLinear column(ParallelLinearOptions{.in = 12, .out = 20, .bias = bias});
    EXPECT_TRUE(at::equal(column->weight, plain->weight));
    EXPECT_EQ(column->bias.defined(), bias);
    const at::Tensor x = input_of(2, 3, 12);
    EXPECT_TRUE(at::equal(column->forward(x), plain(x)));
    EXPECT_THAT(column->parameters(), SizeIs(bias ? 2 : 1));
  }
  torch::manual_seed(4);
  torch::nn::Embedding plain(torch::nn::EmbeddingOptions(9, 4).padding_idx(2));
  torch::manual_seed(4);
  const VocabParallelEmbedding embedding(VocabParallelEmbeddingOptions{.count = 9, .size = 4, .padding = 2});
  const at::Tensor ids = at::arange(9);
  EXPECT_TRUE(at::equal(embedding->forward(ids), plain(ids)));
}

// Columns, rows and a vocabulary, one behind another.
struct Net : torch::nn::Module {
  explicit Net(bool with_bias) {
    words = register_module(
        "words", VocabParallelEmbedding(VocabParallelEmbeddingOptions{.count = 50, .size = 12, .padding = 1}));
    wide = register_module("wide", ColumnParallelLinear(ParallelLinearOptions{
                                       .in = 12, .out = 36, .bias = with_bias, .blocks = {12, 12, 12}}));
    narrow =
        register_module("narrow", RowParallelLinear(ParallelLinearOptions{.in = 12, .out = 12, .bias = with_bias}));
    scores = register_module("scores", ColumnParallelLinear(ParallelLinearOptions{.in = 12, .out = 50, .bias = false}));
  }
  at::Tensor forward(const at::Tensor& tokens) {
    const at::Tensor x = words(tokens);
    const std::vector<at::Tensor> parts = wide(x).split(12, -1);
    const at::Tensor y = x + narrow(parts[0] * parts[1].tanh() + parts[2]);
    return at::cross_entropy_loss(scores(y).flatten(0, 1), tokens.flatten());
  }
  VocabParallelEmbedding words{nullptr};
  ColumnParallelLinear wide{nullptr}, scores{nullptr};
  RowParallelLinear narrow{nullptr};
};

TEST(ParallelLayers, DeclareTheirSplits) {
  for (const int ranks : {1, 2, 3, 4}) {
    for (const bool bias : {true, false}) {
      const at::Tensor tokens = at::arange(24).view({2, 12}) * 7 % 50;
      expect_same_as_whole<Net>([&] { return std::make_shared<Net>(bias); },
                                [&](Net& net) { return net.forward(tokens); }, {.ranks = ranks, .rules = {}});
    }
  }
}

// torch's attention, with the same numbers.
void expect_torchs_attention(bool bias) {
  torch::manual_seed(5);
  const ParallelAttention attention(ParallelAttentionOptions{.hidden = 24, .heads = 4, .bias = bias, .causal = false});
  torch::nn::MultiheadAttention plain(torch::nn::MultiheadAttentionOptions(24, 4).bias(bias));
  copy_into(plain->in_proj_weight,
            at::cat({attention->q_proj->weight, attention->k_proj->weight, attention->v_proj->weight}));
  copy_into(plain->out_proj->weight, attention->o_proj->weight);
  if (bias) {
    copy_into(plain->in_proj_bias,
              at::cat({attention->q_proj->bias, attention->k_proj->bias, attention->v_proj->bias}));
    copy_into(plain->out_proj->bias, attention->o_proj->bias);
  }
  const at::Tensor x = input_of(2, 5, 24);
  const at::Tensor turned = x.transpose(0, 1);
  const at::Tensor expected = std::get<0>(plain(turned, turned, turned)).transpose(0, 1);
  EXPECT_LE(relative_error(attention->forward(x), expected), 1e-6);
}

TEST(ParallelLayers, AttentionIsTorchs) {
  expect_torchs_attention(true);
  expect_torchs_attention(false);
}

TEST(ParallelLayers, MlpIsTorchs) {
  torch::manual_seed(6);
  const ParallelMlp mlp(ParallelMlpOptions{.hidden = 8});
  torch::nn::Sequential plain(torch::nn::Linear(8, 32), torch::nn::GELU(), torch::nn::Linear(32, 8));
  copy_linear(*mlp->up_proj, plain->at<torch::nn::LinearImpl>(0));
  copy_linear(*mlp->down_proj, plain->at<torch::nn::LinearImpl>(2));
  const at::Tensor x = input_of(2, 3, 8);
  EXPECT_LE(relative_error(mlp->forward(x), plain->forward(x)), 1e-6);
  const ParallelMlp gated(
      ParallelMlpOptions{.hidden = 8, .inner = 12, .activation = "silu", .gated = true, .bias = false});
  const at::Tensor expected =
      at::linear(at::silu(at::linear(x, gated->gate_proj->weight)) * at::linear(x, gated->up_proj->weight),
                 gated->down_proj->weight);
  EXPECT_LE(relative_error(gated->forward(x), expected), 1e-6);
}

struct AttentionCase {
  ParallelAttentionOptions options;
  int ranks;
};

class SplitAttention : public ::testing::TestWithParam<AttentionCase> {};

TEST_P(SplitAttention, IsTheWholeOne) {
  const AttentionCase& wanted = GetParam();
  const ParallelAttentionOptions& options = wanted.options;
  const int64_t size = options.head_size > 0 ? options.head_size : options.hidden / options.heads;
  const at::Tensor angle = at::outer(at::arange(6, at::kDouble), at::arange(size, at::kDouble).mul(0.1));
  const RotaryTables tables{.cos = angle.cos(), .sin = angle.sin()};
  const at::Tensor x = input_of(2, 6, options.hidden, at::kDouble);
  expect_same_as_whole<ParallelAttentionImpl>(
      [&] { return in_float64<ParallelAttentionImpl>(options); },
      [&](ParallelAttentionImpl& layer) { return loss_of(layer.forward(x, {}, tables)); },
      {.ranks = wanted.ranks, .rules = {}, .tolerance = kDoublePrecision});
}

const AttentionCase kAttentions[] = {
    {{.hidden = 32, .heads = 4}, 1},
    {{.hidden = 32, .heads = 4}, 2},
    {{.hidden = 32, .heads = 4}, 4},
    {{.hidden = 32, .heads = 4, .bias = false}, 2},
    {{.hidden = 32, .heads = 4, .causal = false}, 2},
    {{.hidden = 32, .heads = 8, .kv_heads = 4}, 2},
    {{.hidden = 32, .heads = 8, .kv_heads = 4, .bias = false}, 4},
    {{.hidden = 32, .heads = 4, .head_size = 6}, 2},
    {{.hidden = 28, .heads = 7}, 3},
    {{.hidden = 28, .heads = 14, .kv_heads = 7}, 3},
};

INSTANTIATE_TEST_SUITE_P(Each, SplitAttention, ::testing::ValuesIn(kAttentions));

TEST(ParallelLayers, AMaskForAllHeads) {
  const at::Tensor x = input_of(2, 6, 32, at::kDouble);
  const at::Tensor mask = at::ones({6, 6}, at::kBool).tril();
  expect_same_as_whole<ParallelAttentionImpl>(
      [&] {
        return in_float64<ParallelAttentionImpl>(ParallelAttentionOptions{.hidden = 32, .heads = 4, .causal = false});
      },
      [&](ParallelAttentionImpl& layer) { return loss_of(layer.forward(x, mask)); },
      {.ranks = 2, .rules = {}, .tolerance = kDoublePrecision});
}

TEST(ParallelLayers, SplitMlps) {
  const at::Tensor x = input_of(2, 3, 10, at::kDouble);
  for (const int ranks : {1, 2, 4}) {
    for (const char* activation : {"gelu", "gelu_tanh", "relu", "silu"}) {
      for (const bool gated : {false, true}) {
        const ParallelMlpOptions options{
            .hidden = 10, .inner = 18, .activation = activation, .gated = gated, .bias = !gated};
        expect_same_as_whole<ParallelMlpImpl>([&] { return in_float64<ParallelMlpImpl>(options); },
                                              [&](ParallelMlpImpl& layer) { return loss_of(layer.forward(x)); },
                                              {.ranks = ranks, .rules = {}, .tolerance = kDoublePrecision});
      }
    }
  }
}

TEST(ParallelLayers, OverAnAxisOfANamedMesh) {
  test::run_ranks(4, [](comm::Communicator& world) {
    const comm::NamedMesh mesh = comm::init_device_mesh(shared(world), {2, 2}, {"dp", "tp"});
    const auto net = made_alike<Net>([] { return std::make_shared<Net>(true); });
    const SplitModule split = parallelize_module(*net, mesh["tp"], {});
    EXPECT_EQ(local_part(net->narrow->weight).size(1), 6);
    const at::Tensor tokens = at::arange(24).view({2, 12}) * 7 % 50;
    const auto plain = made_alike<Net>([] { return std::make_shared<Net>(true); });
    EXPECT_LE(relative_error(whole(net->forward(tokens)), plain->forward(tokens)), 1e-6);
  });
}

TEST(ParallelLayers, CopiesAreLayersOfTheirOwn) {
  const ParallelMlp mlp(ParallelMlpOptions{.hidden = 8});
  const auto copy = std::dynamic_pointer_cast<ParallelMlpImpl>(mlp->clone());
  ASSERT_NE(copy, nullptr);
  const at::Tensor x = input_of(1, 2, 8);
  EXPECT_TRUE(at::equal(copy->forward(x), mlp->forward(x)));
  EXPECT_FALSE(copy->up_proj->weight.is_alias_of(mlp->up_proj->weight));
  EXPECT_THAT(declared_splits(*copy), SizeIs(2));
}

TEST(ParallelLayers, MistakesAreNamed) {
  const auto error = [](const std::function<void()>& make) -> std::string {
    try {
      make();
    } catch (const UsageError& refusal) {
      return refusal.what();
    }
    return "";
  };
  EXPECT_THAT(error([] { RowParallelLinear(ParallelLinearOptions{.in = 4}); }), HasSubstr("in 4 and out 0"));
  EXPECT_THAT(error([] { ParallelAttention(ParallelAttentionOptions{.hidden = 8, .heads = 3}); }),
              HasSubstr("does not divide by 3 heads"));
  EXPECT_THAT(error([] { ParallelAttention(ParallelAttentionOptions{.hidden = 8, .heads = 4, .kv_heads = 3}); }),
              HasSubstr("kv_heads"));
  EXPECT_THAT(error([] { ParallelMlp(ParallelMlpOptions{.hidden = 8, .activation = "mish"}); }), HasSubstr("'mish'"));
  EXPECT_THAT(error([] { VocabParallelEmbedding(VocabParallelEmbeddingOptions{.count = 3, .size = 2, .padding = 3}); }),
              HasSubstr("3 entries"));
  ParallelAttention causal(ParallelAttentionOptions{.hidden = 8, .heads = 2});
  EXPECT_THAT(error([&] { causal(input_of(1, 2, 8), at::ones({2, 2})); }), HasSubstr("causal"));
}

}  // namespace
}  // namespace ds::parallel
