// Sparse attention beside dense attention under the mask of its layout.
#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "core/text.h"
#include "dsengine/errors.h"
#include "dsengine/sparse_attention.h"
#include "ops/attention_mask.h"
#include "ops/sparse_attention_blocks.h"
#include "tests/ops/same_function.h"
#include "tests/optim/vector_targets.h"
#include "tests/support/autocast_scope.h"

namespace ds::ops {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct AttentionSize {
  int64_t batch = 2, heads = 3, time = 40, channels = 10, block = 8;
};

// Blocks by chance, about half of them; `empty_row` has none.
BlockLayout some_layout(const AttentionSize& size, int64_t heads, int64_t empty_row = -1) {
  BlockLayout layout{.heads = heads, .blocks = (size.time + size.block - 1) / size.block, .block = size.block};
  for (int64_t head = 0; head < heads; ++head) {
    for (int64_t row = 0; row < layout.blocks; ++row) {
      for (int64_t column = 0; column < layout.blocks; ++column) {
        const int64_t mixed = (head * 131 + row * 37 + column * 17 + row * column * 5) % 11;
        layout.kept.push_back(row != empty_row && (mixed < 5 || column == row));
      }
    }
  }
  return layout;
}

// [heads or 1, time, time]: what a layout leaves out.
at::Tensor left_out(const BlockLayout& layout, int64_t time, bool causal) {
  const at::Tensor kept = torch::tensor(std::vector<uint8_t>(layout.kept)).to(at::kBool);
  const at::Tensor elements = kept.view({layout.heads, layout.blocks, layout.blocks})
                                  .repeat_interleave(layout.block, 1)
                                  .repeat_interleave(layout.block, 2)
                                  .slice(1, 0, time)
                                  .slice(2, 0, time);
  return causal ? elements.tril().logical_not() : elements.logical_not();
}

// The definition, with whole matrices.
at::Tensor dense(const Tensors& in, const BlockLayout& layout, const SparseAttentionOptions& options) {
  const double scale = options.scale.value_or(1 / std::sqrt(static_cast<double>(in[0].size(3))));
  at::Tensor scores = at::matmul(in[0], in[1].transpose(-1, -2)) * scale;
  const auto masked = [&](const at::Tensor& mask, MaskMode mode) {
    scores = mode == MaskMode::kAdd ? scores + mask : scores.masked_fill(mask == 0, -kInfinity);
  };
  if (options.key_padding_mask.defined()) {
    masked(options.key_padding_mask.unsqueeze(1).unsqueeze(1), options.key_padding_mask_mode);
  }
  if (options.attention_mask.defined()) masked(options.attention_mask, options.attention_mask_mode);
  const at::Tensor none = left_out(layout, in[0].size(2), options.causal).unsqueeze(0);
  scores = scores.masked_fill(none, -kInfinity);
  const at::Tensor empty = scores.eq(-kInfinity).all(-1, true);
  const at::Tensor weights = scores.masked_fill(empty, 0).softmax(-1).masked_fill(empty, 0);
  return at::matmul(weights, in[2]);
}

Tensors some_inputs(const AttentionSize& size, at::ScalarType type = at::kFloat) {
  const std::vector<int64_t> sizes = {size.batch, size.heads, size.time, size.channels};
  // Halved: scores of a few units, as those of models are; larger ones have float32 errors of their own.
  return {wave(sizes, 0.1, type) * 0.5, wave(sizes, 1.3, type) * 0.5, wave(sizes, 2.2, type) * 0.5};
}

TensorFunction sparse_of(const BlockLayout& layout, const SparseAttentionOptions& options) {
  return [=](const Tensors& in) { return Tensors{sparse_attention(in[0], in[1], in[2], layout, options)}; };
}
TensorFunction dense_of(const BlockLayout& layout, const SparseAttentionOptions& options) {
  return [=](const Tensors& in) { return Tensors{dense(in, layout, options)}; };
}
// As on devices without a kernel.
TensorFunction blocks_of(const BlockLayout& layout, const SparseAttentionOptions& options) {
  return [=](const Tensors& in) {
    const at::ScalarType wide = in[0].scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    const double scale = options.scale.value_or(1 / std::sqrt(static_cast<double>(in[0].size(3))));
    const LayoutRows rows(std::make_shared<const BlockLayout>(layout));
    return Tensors{
        attention_of_blocks(in[0], in[1], in[2], rows, added_masks("blocks", options, wide), {options.causal, scale})};
  };
}

void expect_dense(const AttentionSize& size, const BlockLayout& layout, const SparseAttentionOptions& options,
                  const std::string& what) {
  for (const auto& [type, tolerance] : {std::pair{at::kFloat, 2e-6}, std::pair{at::kDouble, 1e-13}}) {
    SparseAttentionOptions own = options;
    const auto cast = [&](at::Tensor& mask) {
      if (mask.defined() && mask.is_floating_point()) mask = mask.to(type);
    };
    cast(own.key_padding_mask);
    cast(own.attention_mask);
    const Tensors inputs = some_inputs(size, type);
    const std::string named = cat(what, ", ", c10::toString(type));
    const Tensors exact = {inputs[0].to(at::kDouble), inputs[1].to(at::kDouble), inputs[2].to(at::kDouble)};
    const Evaluated expected = evaluate(dense_of(layout, own), exact);
    expect_same(evaluate(sparse_of(layout, own), inputs), expected, tolerance, named);
    expect_same(evaluate(blocks_of(layout, own), inputs), expected, tolerance, named + ", by LibTorch's operators");
  }
}

TEST(SparseAttention, IsDenseAttentionUnderTheLayout) {
  const std::vector<AttentionSize> sizes = {{},
                                            {.time = 37},
                                            {.time = 5},
                                            {.batch = 1, .heads = 1, .time = 1, .channels = 1, .block = 1},
                                            {.time = 50, .channels = 16, .block = 16},
                                            {.time = 70, .channels = 33, .block = 20},
                                            {.batch = 1, .heads = 2, .time = 300, .channels = 24, .block = 140}};
  for (const AttentionSize& size : sizes) {
    for (const int64_t heads : {int64_t{1}, size.heads}) {
      for (const bool causal : {false, true}) {
        const std::string what = cat(size.time, " tokens, blocks of ", size.block, ", ", heads, " heads, ", causal);
        expect_dense(size, some_layout(size, heads), {.causal = causal}, what);
      }
    }
  }
}

TEST(SparseAttention, Masks) {
  const AttentionSize size;
  const BlockLayout layout = some_layout(size, size.heads);
  const at::Tensor keep_keys = at::arange(size.batch * size.time).view({size.batch, size.time}).remainder(7).ne(3);
  const at::Tensor keep = at::arange(size.time * size.time).view({size.time, size.time}).remainder(5).ne(2);
  const at::Tensor bias = wave({size.batch, size.heads, size.time, size.time}, 0.5, at::kDouble);
  const at::Tensor padding = at::zeros({size.batch, size.time}, at::kDouble).masked_fill(keep_keys.logical_not(), -1e4);
  const auto multiply = MaskMode::kMultiply;
  for (const bool causal : {false, true}) {
    expect_dense(size, layout, {.causal = causal, .key_padding_mask = padding}, "keys, add");
    expect_dense(size, layout,
                 {.causal = causal, .key_padding_mask = keep_keys, .key_padding_mask_mode = multiply, .scale = 0.7},
                 "keys, multiply");
    expect_dense(size, layout, {.causal = causal, .attention_mask = keep}, "pairs, multiply");
    expect_dense(size, layout, {.causal = causal, .attention_mask = keep.to(at::kDouble)}, "pairs, numbers");
    expect_dense(size, layout,
                 {.causal = causal,
                  .key_padding_mask = keep_keys,
                  .key_padding_mask_mode = multiply,
                  .attention_mask = bias,
                  .attention_mask_mode = MaskMode::kAdd},
                 "both, a bias of each head");
    expect_dense(size, layout,
                 {.causal = causal,
                  .attention_mask = bias.slice(0, 0, 1).transpose(2, 3),
                  .attention_mask_mode = MaskMode::kAdd},
                 "a bias of all samples that is not contiguous");
  }
}

TEST(SparseAttention, QueriesWithoutKeysGiveZeros) {
  const AttentionSize size;
  const BlockLayout layout = some_layout(size, 1, 2);
  const at::Tensor none = at::zeros({size.batch, size.time}, at::kBool);
  expect_dense(size, layout, {}, "an empty row of blocks");
  expect_dense(size, layout, {.key_padding_mask = none, .key_padding_mask_mode = MaskMode::kMultiply}, "no key");
  const Evaluated found = evaluate(sparse_of(layout, {}), some_inputs(size));
  EXPECT_TRUE(found.results[0].slice(2, 16, 24).eq(0).all().item<bool>());
  EXPECT_TRUE(found.gradients[0].slice(2, 16, 24).eq(0).all().item<bool>());
  for (const at::Tensor& gradient : found.gradients) EXPECT_TRUE(gradient.isfinite().all().item<bool>());
}

TEST(SparseAttention, GradientsAreThoseOfDifferences) {
  const AttentionSize size{.batch = 1, .heads = 2, .time = 7, .channels = 3, .block = 2};
  const SparseAttentionOptions options{
      .causal = true, .attention_mask = wave({7, 7}, 0.3, at::kDouble), .attention_mask_mode = MaskMode::kAdd};
  expect_numerical_gradients(weighted(sparse_of(some_layout(size, 2), options)), some_inputs(size, at::kDouble));
}

TEST(SparseAttention, BFloat16IsRoundedOnce) {
  const AttentionSize size{.time = 100, .channels = 32, .block = 16};
  const BlockLayout layout = some_layout(size, size.heads);
  const at::ScalarType type = at::kBFloat16;
  expect_rounded(sparse_of(layout, {.causal = true}), dense_of(layout, {.causal = true}), some_inputs(size, type), 8e-3,
                 "bfloat16");
  EXPECT_EQ(sparse_of(layout, {})(some_inputs(size, type))[0].scalar_type(), type);
  expect_rounded(sparse_of(layout, {}), dense_of(layout, {}), some_inputs(size, at::kHalf), 4e-3, "float16");
}

TEST(SparseAttention, EveryInstructionSetAndNumberOfThreads) {
  const AttentionSize size{.time = 150, .channels = 20, .block = 16};
  const BlockLayout layout = some_layout(size, size.heads);
  const Evaluated expected = evaluate(dense_of(layout, {.causal = true}), some_inputs(size, at::kDouble));
  for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
    const optimizers::WithTarget use(target);
    const std::string what = hwy::TargetName(target);
    expect_same(evaluate(sparse_of(layout, {.causal = true}), some_inputs(size)), expected, 1e-6, what);
    expect_same(evaluate(sparse_of(layout, {.causal = true}), some_inputs(size, at::kDouble)), expected, 1e-13, what);
  }
  const int before = at::get_num_threads();
  at::set_num_threads(1);
  const Evaluated alone = evaluate(sparse_of(layout, {}), some_inputs(size));
  at::set_num_threads(3);
  const Evaluated together = evaluate(sparse_of(layout, {}), some_inputs(size));
  at::set_num_threads(before);
  EXPECT_TRUE(together.results[0].equal(alone.results[0]));
  for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(together.gradients[i].equal(alone.gradients[i])) << i;
}

TEST(SparseAttention, PartsOfAPackedTensorAsTheyLie) {
  const at::Tensor packed = wave({2, 21, 3 * 24}, 0.6);  // query, key and value of 3 heads
  const BlockLayout layout = some_layout({.time = 21, .block = 4}, 1);
  const auto function = [&](bool sparse) {
    return [&, sparse](const Tensors& in) {
      Tensors parts;
      for (const at::Tensor& part : in[0].split(24, 2)) parts.push_back(part.view({2, 21, 3, 8}).transpose(1, 2));
      return Tensors{sparse ? sparse_attention(parts[0], parts[1], parts[2], layout) : dense(parts, layout, {})};
    };
  };
  expect_same(evaluate(function(true), {packed}), evaluate(function(false), {packed}), 1e-6, "packed");
  const Tensors in = some_inputs({.time = 21});
  EXPECT_TRUE(sparse_attention(in[0], in[1], in[2], layout).transpose(1, 2).is_contiguous());
  const Tensors turned = {in[0].transpose(2, 3).contiguous().transpose(2, 3), in[1], in[2]};
  EXPECT_TRUE(
      sparse_attention(turned[0], turned[1], turned[2], layout).equal(sparse_attention(in[0], in[1], in[2], layout)));
}

TEST(SparseAttention, NumbersThatAreNotFiniteAreSeen) {
  const AttentionSize size;
  const BlockLayout layout = some_layout(size, 1);
  for (size_t input = 0; input < 3; ++input) {
    Tensors in = some_inputs(size);
    in[input][0][0][0][0] = std::numeric_limits<double>::quiet_NaN();
    EXPECT_TRUE(sparse_attention(in[0], in[1], in[2], layout).isnan().any().item<bool>()) << input;
  }
}

TEST(SparseSelfAttention, HasTheLayoutsOfItsPattern) {
  const SparsityPattern pattern{.mode = SparsityMode::kBigBird,
                                .block = 4,
                                .different_layout_per_head = true,
                                .unidirectional = true,
                                .num_random_blocks = 1};
  const SparseSelfAttention attend(pattern, 3, 9);
  for (const int64_t time : {5, 40, 33}) {
    const Tensors in = some_inputs({.time = time});
    const BlockLayout layout = block_layout(pattern, 3, time, 9);
    EXPECT_EQ(attend.layout(time)->kept, layout.kept);
    const at::Tensor expected = dense(in, layout, {.causal = true});  // unidirectional
    EXPECT_LE(relative_difference(attend(in[0], in[1], in[2]), expected), 1e-6);
  }
  EXPECT_THAT([&] { SparseSelfAttention({.block = 0}, 3, 9); },
              ThrowsMessage<UsageError>(HasSubstr("block: expected")));
  const Tensors two = some_inputs({.heads = 2});
  EXPECT_THAT([&] { attend(two[0], two[1], two[2]); }, ThrowsMessage<UsageError>(HasSubstr("[batch, 3 heads")));
}

TEST(SparseSelfAttention, ScansALayoutOnce) {
  const SparseSelfAttention attend({.mode = SparsityMode::kBigBird, .block = 8, .num_random_blocks = 1}, 3, 9);
  EXPECT_EQ(attend.layout(33), attend.layout(40));  // five blocks both
  EXPECT_NE(attend.layout(32), attend.layout(40));
  const LayoutRows rows(attend.layout(40));
  EXPECT_EQ(&rows.rows(true), &rows.rows(true));
  EXPECT_NE(&rows.rows(true), &rows.rows(false));
  EXPECT_EQ(&rows.groups(3, false, at::kCPU), &rows.groups(3, false, at::kCPU));
  for (const bool causal : {false, true, false}) {
    const Tensors in = some_inputs({});
    const at::Tensor expected = dense(in, *attend.layout(40), {.causal = causal});
    EXPECT_LE(relative_difference(attend(in[0], in[1], in[2], {.causal = causal}), expected), 1e-6);
  }
}

TEST(SparseSelfAttention, TrainsAfterACallInInferenceMode) {
  for (const at::ScalarType type : {at::kFloat, at::kHalf}) {  // the kernels, and LibTorch's operators
    const SparseSelfAttention attend({.mode = SparsityMode::kFixed, .block = 8}, 3, 9);
    Tensors in = some_inputs({}, type);
    {
      const c10::InferenceMode inference;
      attend(in[0], in[1], in[2]);
    }
    in[0].requires_grad_(true);
    attend(in[0], in[1], in[2]).sum().backward();
    EXPECT_GT(in[0].grad().abs().max().item<double>(), 0) << type;
  }
}

// A score of 30 in 16 bits may be off by an eighth, and its weight by as much.
TEST(SparseAttention, ScoresOf16BitsAreNotRounded) {
  const AttentionSize size{.time = 40, .channels = 32, .block = 8};
  const BlockLayout layout = some_layout(size, 1);
  for (const at::ScalarType type : {at::kBFloat16, at::kHalf}) {
    Tensors in = some_inputs(size, type);
    in[0] = in[0] * 6;
    in[1] = in[1] * 6;
    const Tensors exact = {in[0].to(at::kDouble), in[1].to(at::kDouble), in[2].to(at::kDouble)};
    const double allowed = type == at::kHalf ? 1e-3 : 8e-3;  // weights, and the result, are rounded
    EXPECT_LE(relative_difference(blocks_of(layout, {})(in)[0].to(at::kDouble), dense(exact, layout, {})), allowed)
        << type;
  }
}

TEST(SparseSelfAttention, DenseIsLibTorchs) {
  const SparseSelfAttention attend = SparseSelfAttention::dense(3);
  const Tensors in = some_inputs({});
  EXPECT_EQ(attend.layout(40), nullptr);
  EXPECT_TRUE(attend(in[0], in[1], in[2], {.causal = true})
                  .equal(at::scaled_dot_product_attention(in[0], in[1], in[2], {}, 0.0, true)));
  const BlockLayout all{.heads = 1, .blocks = 1, .block = 40, .kept = {1}};
  const SparseAttentionOptions masked{.causal = true,
                                      .key_padding_mask = at::arange(80).view({2, 40}).ne(7),
                                      .key_padding_mask_mode = MaskMode::kMultiply,
                                      .attention_mask = wave({40, 40}, 0.2),
                                      .attention_mask_mode = MaskMode::kAdd};
  EXPECT_LE(relative_difference(attend(in[0], in[1], in[2], masked), dense(in, all, masked)), 1e-6);
}

TEST(SparseAttention, ResultsMayBeChangedInPlace) {
  const Tensors in = some_inputs({});
  const BlockLayout layout = some_layout({}, 1);
  const at::Tensor expected = sparse_attention(in[0], in[1], in[2], layout) * 2;
  EXPECT_TRUE(sparse_attention(in[0], in[1], in[2], layout).mul_(2).equal(expected));
  const at::Tensor leaf = in[0].clone().requires_grad_(true);
  const at::Tensor changed = sparse_attention(leaf, in[1], in[2], layout).mul_(2);
  EXPECT_TRUE(changed.equal(expected));
  // Backward needs the result: it names what happened, and gives no wrong number.
  EXPECT_THAT([&] { changed.sum().backward(); },
              ThrowsMessage<c10::Error>(HasSubstr("modified by an inplace operation")));
}

TEST(SparseAttention, ResultsLieAlikeInMemory) {
  const AttentionSize size{.time = 37};
  const BlockLayout layout = some_layout(size, 1);
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kHalf}) {
    const Tensors in = some_inputs(size, type);
    EXPECT_TRUE(sparse_of(layout, {})(in)[0].transpose(1, 2).is_contiguous()) << type;
    EXPECT_TRUE(blocks_of(layout, {})(in)[0].transpose(1, 2).is_contiguous()) << type;
  }
}

TEST(SparseAttention, ExpandedMasksStayExpanded) {
  const AttentionSize size;
  const BlockLayout layout = some_layout(size, 1);
  const at::Tensor keys = at::arange(size.time).remainder(5).ne(2);
  const at::Tensor mask = keys.view({1, 1, 1, size.time}).expand({size.batch, size.heads, size.time, size.time});
  expect_dense(size, layout, {.attention_mask = mask}, "one row of keys, expanded");
  expect_dense(size, layout, {.attention_mask = mask.transpose(2, 3)}, "expanded along its keys");
  const Tensors in = some_inputs(size);
  const AddedMasks added = added_masks("masks", {.attention_mask = mask}, at::kFloat);
  EXPECT_EQ(added.scores.sizes(), mask.sizes());
  EXPECT_EQ(added.scores.storage().nbytes(), static_cast<size_t>(size.time) * sizeof(float));
}

TEST(SparseAttention, MasksAreSavedAsTheyAre) {
  const Tensors in = some_inputs({});
  at::Tensor mask = at::ones({40, 40}, at::kBool).tril();
  const at::Tensor leaf = in[0].clone().requires_grad_(true);
  const at::Tensor result = sparse_attention(leaf, in[1], in[2], some_layout({}, 1), {.attention_mask = mask});
  mask.fill_(true);
  EXPECT_THAT([&] { result.sum().backward(); },
              ThrowsMessage<c10::Error>(HasSubstr("modified by an inplace operation")));
}

TEST(SparseAttention, LargeNegativeMasksLeaveGradientsRight) {
  const AttentionSize size;
  const BlockLayout layout = some_layout(size, 1);
  at::Tensor padding = at::zeros({size.batch, size.time});
  padding[0] = -1e9;  // of float32's scores nothing is left: all keys count the same
  for (const bool causal : {false, true}) {
    const SparseAttentionOptions options{.causal = causal, .key_padding_mask = padding};
    const Evaluated expected = evaluate(dense_of(layout, options), some_inputs(size));
    EXPECT_GT(expected.gradients[2][0].abs().max().item<double>(), 1e-3);
    expect_same(evaluate(sparse_of(layout, options), some_inputs(size)), expected, 5e-6, "kernels");
    expect_same(evaluate(blocks_of(layout, options), some_inputs(size)), expected, 5e-6, "LibTorch's operators");
  }
}

TEST(SparseAttention, UnidirectionalLayoutsLookAheadNowhere) {
  const BlockLayout layout = block_layout({.block = 8, .unidirectional = true}, 3, 40, 0);
  expect_same(evaluate(sparse_of(layout, {}), some_inputs({})),
              evaluate(dense_of(layout, {.causal = true}), some_inputs({})), 5e-6, "a unidirectional layout");
}

TEST(SparseAttention, EmptyTensorsGiveEmptyOnes) {
  const AttentionSize size{.batch = 0};
  const Evaluated found = evaluate(sparse_of(some_layout(size, 1), {}), some_inputs(size));
  EXPECT_EQ(found.results[0].sizes(), (std::vector<int64_t>{0, 3, 40, 10}));
  for (const at::Tensor& gradient : found.gradients) EXPECT_EQ(gradient.numel(), 0);
}

TEST(SparseAttention, AutocastCastsAsLibTorchDoes) {
  const Tensors in = some_inputs({});
  const BlockLayout layout = some_layout({}, 1);
  const Tensors rounded = {in[0].to(at::kBFloat16), in[1].to(at::kBFloat16), in[2].to(at::kBFloat16)};
  const at::Tensor expected = sparse_attention(rounded[0], rounded[1], rounded[2], layout);
  const test::AutocastScope autocast;
  const at::Tensor found = sparse_attention(rounded[0], in[1], in[2], layout);
  const at::Tensor exact =
      sparse_attention(in[0].to(at::kDouble), in[1].to(at::kDouble), in[2].to(at::kDouble), layout);
  EXPECT_TRUE(found.equal(expected));
  EXPECT_EQ(exact.scalar_type(), at::kDouble);
}

TEST(SparseAttention, MisuseIsRefused) {
  const Tensors in = some_inputs({});
  const BlockLayout layout = some_layout({}, 1);
  const auto refused = [&](const Tensors& x, const SparseAttentionOptions& options, const std::string& text) {
    EXPECT_THAT([&] { sparse_attention(x[0], x[1], x[2], layout, options); },
                ThrowsMessage<UsageError>(HasSubstr(text)));
  };
  refused({in[0].slice(2, 0, 31), in[1].slice(2, 0, 31), in[2].slice(2, 0, 31)}, {}, "expected a layout of 31 tokens");
  refused({in[0], in[1].slice(2, 0, 39), in[2]}, {}, "expected a key of the query's shape");
  refused({in[0], in[1], in[2].to(at::kDouble)}, {}, "expected a value of the query's shape, dtype");
  refused({in[0][0], in[1], in[2]}, {}, "[batch, heads, time, channels]");
  refused(in, {.key_padding_mask = at::ones({2, 39})}, "key_padding_mask: expected [batch, time] = [2, 40]");
  refused(in, {.key_padding_mask = at::ones({2, 40}, at::kBool)}, "give its mode as kMultiply");
  refused(in, {.attention_mask = at::ones({3, 40, 40})}, "attention_mask: expected [time, time] or");
  refused(in, {.attention_mask = at::ones({40, 40}).requires_grad_(true)}, "masks get none");
  EXPECT_THAT([&] { sparse_attention(in[0], in[1], in[2], some_layout({}, 2)); },
              ThrowsMessage<UsageError>(HasSubstr("1 or 3 heads, found 2")));
  const at::Tensor leaf = in[0].clone().requires_grad_(true);
  EXPECT_THAT(
      [&] { torch::autograd::grad({sparse_attention(leaf, in[1], in[2], layout).sum()}, {leaf}, {}, true, true); },
      ThrowsMessage<UsageError>(HasSubstr("without create_graph")));
}

}  // namespace
}  // namespace ds::ops
