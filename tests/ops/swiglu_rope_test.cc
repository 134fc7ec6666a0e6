// swiglu and rope beside chains of LibTorch's operators.
#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "core/text.h"
#include "dsengine/errors.h"
#include "dsengine/ops.h"
#include "tests/ops/same_function.h"
#include "tests/optim/vector_targets.h"

namespace ds::ops {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

const TensorFunction kSwigluOfTwo = [](const Tensors& in) { return Tensors{swiglu(in[0], in[1])}; };
const TensorFunction kSiluChain = [](const Tensors& in) { return Tensors{at::silu(in[0]) * in[1]}; };
const TensorFunction kSwigluOfOne = [](const Tensors& in) { return Tensors{swiglu(in[0])}; };
const TensorFunction kChunkChain = [](const Tensors& in) {
  const std::vector<at::Tensor> halves = in[0].chunk(2, -1);
  return Tensors{at::silu(halves[0]) * halves[1]};
};

TEST(Swiglu, IsTheChainForAnySizeAndDtype) {
  for (const std::vector<int64_t>& sizes :
       std::vector<std::vector<int64_t>>{{1}, {3, 5}, {2, 3, 16}, {7, 33}, {300, 130}, {0, 4}, {4, 0}}) {
    const std::string what = cat(at::IntArrayRef(sizes));
    std::vector<int64_t> twice = sizes;
    twice.back() *= 2;
    for (const auto& [type, tolerance] : {std::pair{at::kFloat, 1e-6}, std::pair{at::kDouble, 1e-14}}) {
      expect_same_function(kSwigluOfTwo, kSiluChain, {wave(sizes, 0.2, type) * 4.0, wave(sizes, 1.9, type)}, tolerance,
                           what);
      expect_same_function(kSwigluOfOne, kChunkChain, {wave(twice, 0.2, type) * 4.0}, tolerance, what + " packed");
    }
    for (const auto& [type, step] : {std::pair{at::kBFloat16, 0x1p-8}, std::pair{at::kHalf, 0x1p-9}}) {
      expect_rounded(kSwigluOfTwo, kSiluChain, {wave(sizes, 0.2, type) * 4.0, wave(sizes, 1.9, type)}, step, what);
      expect_rounded(kSwigluOfOne, kChunkChain, {wave(twice, 0.2, type) * 4.0}, step, what + " packed");
    }
  }
}

TEST(Swiglu, EveryInstructionSetGivesTheSame) {
  for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
    const optimizers::WithTarget use(target);
    const std::string what = hwy::TargetName(target);
    expect_same_function(kSwigluOfTwo, kSiluChain, {wave({5, 37}, 0.2) * 4.0, wave({5, 37}, 1.9)}, 1e-6, what);
    expect_same_function(kSwigluOfOne, kChunkChain, {wave({5, 38}, 0.2, at::kDouble)}, 1e-14, what);
    expect_rounded(kSwigluOfOne, kChunkChain, {wave({5, 38}, 0.2, at::kBFloat16)}, 0x1p-8, what);
  }
}

TEST(Swiglu, DtypesThatDifferArePromotedAsByAProduct) {
  const Tensors inputs = {wave({5, 9}, 0.2), wave({5, 9}, 1.9, at::kBFloat16)};
  const Evaluated found = evaluate(kSwigluOfTwo, inputs);
  const Evaluated expected = evaluate(kSiluChain, inputs);
  EXPECT_EQ(found.results[0].scalar_type(), at::kFloat);
  EXPECT_EQ(found.gradients[1].scalar_type(), at::kBFloat16);
  expect_same({found.results, {}}, {expected.results, {}}, 1e-6, "results");
  expect_same(found, expected, 0x1p-8, "gradients");
}

TEST(Swiglu, GradientsAreThoseOfDifferences) {
  expect_numerical_gradients(weighted(kSwigluOfTwo), {wave({3, 7}, 0.2, at::kDouble), wave({3, 7}, 1.9, at::kDouble)});
  expect_numerical_gradients(weighted(kSwigluOfOne), {wave({3, 14}, 0.2, at::kDouble)});
}

TEST(Swiglu, LargeNumbersAreThoseOfTheChain) {
  const float infinity = std::numeric_limits<float>::infinity();
  const at::Tensor gate = at::tensor({-infinity, -3e38F, -200.0F, -89.0F, -88.0F, -20.0F, -0.0F, 0.0F, 20.0F, 88.0F,
                                      200.0F, 3e38F, infinity, std::nanf("")});
  const at::Tensor up = at::full_like(gate, 0.5);
  const at::Tensor found = swiglu(gate, up);
  const at::Tensor expected = at::silu(gate) * up;
  EXPECT_TRUE(at::allclose(found, expected, 1e-6, 1e-35, /*equal_nan=*/true)) << found << expected;
}

// Around where an exponential of each dtype ends, on every instruction set, beside the chain in float64. What is too
// large for the kernel's own dtype, float32 but for float64, is infinite.
TEST(Swiglu, ExtremesOfEveryDtype) {
  const double infinity = std::numeric_limits<double>::infinity();
  const at::Tensor extremes =
      at::tensor({-infinity, -3e38, -800.0, -745.0, -709.0, -200.0, -104.0, -88.0, -87.0, -20.0,    -0.0,        0.0,
                  20.0,      87.0,  88.0,   104.0,  200.0,  709.0,  745.0,  800.0, 3e38,  infinity, std::nan("")},
                 at::kDouble);
  for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
    const optimizers::WithTarget use(target);
    for (const auto& [type, tolerance, smallest] :
         {std::tuple{at::kFloat, 1e-6, 1e-35}, {at::kBFloat16, 0x1p-8, 1e-35}, {at::kDouble, 1e-14, 1e-290}}) {
      const at::Tensor gate = extremes.to(type);
      const at::ScalarType wide = type == at::kDouble ? at::kDouble : at::kFloat;
      for (const double up : {0.5, -3.0}) {
        const at::Tensor found = swiglu(gate, at::full_like(gate, up)).to(at::kDouble);
        const at::Tensor exact = (at::silu(gate.to(at::kDouble)) * up).to(wide).to(at::kDouble);
        EXPECT_TRUE(at::allclose(found, exact, tolerance, smallest, /*equal_nan=*/true))
            << hwy::TargetName(target) << ", " << type << ", up " << up << "\n"
            << at::stack({gate.to(at::kDouble), found, exact}, 1);
      }
    }
  }
}

TEST(Swiglu, GradientsAtExtremesAreThoseOfTheChain) {
  for (const auto& [type, tolerance, smallest] :
       {std::tuple{at::kFloat, 1e-6, 1e-35}, {at::kBFloat16, 0x1p-8, 1e-35}, {at::kDouble, 1e-14, 1e-290}}) {
    const at::Tensor gate =
        at::tensor({-800.0, -709.0, -200.0, -104.0, -88.0, -20.0, 20.0, 88.0, 104.0, 200.0, 709.0, 800.0}, at::kDouble)
            .to(type);
    const at::Tensor up = at::full_like(gate, 0.5);
    const Evaluated found = evaluate(kSwigluOfTwo, {gate, up});
    const Evaluated exact = evaluate(kSiluChain, {gate.to(at::kDouble), up.to(at::kDouble)});
    for (size_t i = 0; i < 2; ++i) {
      EXPECT_TRUE(at::allclose(found.gradients[i].to(at::kDouble), exact.gradients[i], tolerance, smallest))
          << type << ", gradient " << i << "\n"
          << at::stack({found.gradients[i].to(at::kDouble), exact.gradients[i]}, 1);
    }
  }
}

TEST(Swiglu, TensorsThatAreNotContiguous) {
  expect_same_function(kSwigluOfTwo, kSiluChain, {wave({5, 8}, 0.2).t(), wave({8, 5}, 1.9)}, 1e-6, "transposed");
  const at::Tensor packed = wave({2, 3, 20}, 0.4);
  expect_same_function(kSwigluOfTwo, kSiluChain, {packed.narrow(2, 0, 10), packed.narrow(2, 10, 10)}, 1e-6, "packed");
  expect_same_function(kSwigluOfOne, kChunkChain, {wave({2, 20, 3}, 0.4).transpose(1, 2)}, 1e-6, "transposed, packed");
  const auto turned = [](const TensorFunction& function) -> TensorFunction {
    return [function](const Tensors& in) { return Tensors{function(in)[0].t()}; };
  };
  expect_same_function(turned(kSwigluOfTwo), turned(kSiluChain), {wave({5, 8}, 0.2), wave({5, 8}, 1.9)}, 1e-6,
                       "gradient");
}

TEST(Swiglu, ThreadsChangeNoBitAndMisuseIsRefused) {
  const Tensors inputs = {wave({300, 1001}, 0.2), wave({300, 1001}, 1.9)};
  const int before = at::get_num_threads();
  at::set_num_threads(4);
  const Evaluated four = evaluate(kSwigluOfTwo, inputs);
  at::set_num_threads(1);
  const Evaluated one = evaluate(kSwigluOfTwo, inputs);
  at::set_num_threads(before);
  EXPECT_TRUE(one.results[0].equal(four.results[0]));
  for (size_t i = 0; i < 2; ++i) EXPECT_TRUE(one.gradients[i].equal(four.gradients[i]));

  const at::Tensor x = wave({3, 8}, 0.1).requires_grad_(true);
  EXPECT_THAT([&] { torch::autograd::grad({swiglu(x).sum()}, {x}, {}, true, /*create_graph=*/true); },
              ThrowsMessage<UsageError>(HasSubstr("without create_graph")));
  EXPECT_THAT([&] { swiglu(x, wave({3, 7}, 0)); }, ThrowsMessage<UsageError>(HasSubstr("[3, 8] of Float and [3, 7]")));
  EXPECT_THAT([&] { swiglu(x, x.to(at::kInt)); }, ThrowsMessage<UsageError>(HasSubstr("of Int")));
  EXPECT_THAT([&] { swiglu(wave({3, 7}, 0)); }, ThrowsMessage<UsageError>(HasSubstr("[..., 2 F]")));
}

// By the definition, with tables laid along `dim`.
TensorFunction rope_chain(const RopeTables& tables, const RopeOptions& options) {
  return [tables, options](const Tensors& in) {
    const at::Tensor& x = in[0];
    const int64_t dim = options.position_dim < 0 ? options.position_dim + x.dim() : options.position_dim;
    std::vector<int64_t> shape(static_cast<size_t>(x.dim()), 1);
    shape[static_cast<size_t>(dim)] = x.size(dim);
    shape.back() = tables.cos.size(1);
    const at::Tensor cos = tables.cos.narrow(0, 0, x.size(dim)).view(shape).to(x.scalar_type());
    const at::Tensor sin = tables.sin.narrow(0, 0, x.size(dim)).view(shape).to(x.scalar_type());
    const int64_t pairs = tables.cos.size(1);
    const bool halves = options.pairs == RopePairs::kHalves;
    const at::Tensor a = halves ? x.narrow(-1, 0, pairs) : x.slice(-1, 0, 2 * pairs, 2);
    const at::Tensor b = halves ? x.narrow(-1, pairs, pairs) : x.slice(-1, 1, 2 * pairs, 2);
    const at::Tensor first = a * cos - b * sin;
    const at::Tensor second = b * cos + a * sin;
    const at::Tensor turned = halves ? at::cat({first, second}, -1) : at::stack({first, second}, -1).flatten(-2);
    return Tensors{at::cat({turned, x.narrow(-1, 2 * pairs, x.size(-1) - 2 * pairs)}, -1)};
  };
}

TensorFunction rope_of(const RopeTables& tables, const RopeOptions& options) {
  return [tables, options](const Tensors& in) { return Tensors{rope(in[0], tables.cos, tables.sin, options)}; };
}

struct RopeCase {
  std::vector<int64_t> sizes;
  int64_t position_dim;
  int64_t channels;  // that are turned
};

const std::vector<RopeCase> kRopeCases = {
    {{5, 2}, 0, 2},         {{6, 10}, -2, 6},          {{3, 7, 16}, 1, 16},         {{2, 3, 9, 70}, -2, 66},
    {{2, 9, 3, 40}, 1, 40}, {{2, 3, 4, 5, 12}, 2, 12}, {{2, 3, 4, 5, 6, 8}, -2, 4}, {{0, 4, 8}, 1, 8}};

TEST(Rope, IsTheDefinitionForAnyShape) {
  for (const RopeCase& of : kRopeCases) {
    for (const RopePairs pairs : {RopePairs::kHalves, RopePairs::kInterleaved}) {
      const RopeOptions options{pairs, of.position_dim};
      const RopeTables tables = rope_tables(12, of.channels, 10000.0, at::kDouble);
      const std::string what = cat(at::IntArrayRef(of.sizes), pairs == RopePairs::kHalves ? " halves" : " interleaved");
      const TensorFunction found = rope_of(tables, options);
      const TensorFunction expected = rope_chain(tables, options);
      expect_same_function(found, expected, {wave(of.sizes, 0.3, at::kDouble)}, 1e-14, what);
      expect_same_function(found, expected, {wave(of.sizes, 0.3)}, 1e-6, what);
      expect_rounded(found, expected, {wave(of.sizes, 0.3, at::kBFloat16)}, 0x1p-8, what);
      expect_rounded(found, expected, {wave(of.sizes, 0.3, at::kHalf)}, 0x1p-10, what);
    }
  }
}

TEST(Rope, EveryInstructionSetGivesTheSame) {
  const RopeTables tables = rope_tables(9, 46, 10000.0, at::kDouble);
  for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
    const optimizers::WithTarget use(target);
    for (const RopePairs pairs : {RopePairs::kHalves, RopePairs::kInterleaved}) {
      const RopeOptions options{.pairs = pairs};
      for (const at::ScalarType type : {at::kFloat, at::kDouble, at::kBFloat16}) {
        expect_rounded(rope_of(tables, options), rope_chain(tables, options), {wave({2, 9, 50}, 0.3, type)},
                       type == at::kBFloat16 ? 0x1p-8
                       : type == at::kFloat  ? 1e-6
                                             : 1e-14,
                       hwy::TargetName(target));
      }
    }
  }
}

TEST(Rope, GradientsAreThoseOfDifferencesAndARotationKeepsLengths) {
  const RopeTables tables = rope_tables(4, 6, 100.0, at::kDouble);
  for (const RopePairs pairs : {RopePairs::kHalves, RopePairs::kInterleaved}) {
    const RopeOptions options{.pairs = pairs};
    expect_numerical_gradients(weighted(rope_of(tables, options)), {wave({2, 4, 9}, 0.2, at::kDouble)});
    const at::Tensor x = wave({2, 4, 6}, 0.2, at::kDouble);
    const at::Tensor y = rope(x, tables.cos, tables.sin, options);
    EXPECT_LE(relative_difference(y.norm(2, -1), x.norm(2, -1)), 1e-14);
    EXPECT_TRUE(y.select(1, 0).equal(x.select(1, 0))) << "position 0 is not turned";
    EXPECT_FALSE(y.select(1, 1).equal(x.select(1, 1)));
  }
}

TEST(Rope, TensorsThatAreNotContiguous) {
  const RopeTables tables = rope_tables(9, 8);
  const RopeOptions options;
  const at::Tensor packed = wave({2, 9, 3 * 32}, 0.6);  // query, key and value of 4 heads
  const auto heads = [&](int64_t part) { return packed.narrow(2, 32 * part, 32).view({2, 9, 4, 8}).transpose(1, 2); };
  expect_same_function(rope_of(tables, options), rope_chain(tables, options), {heads(1)}, 1e-6, "packed");
  EXPECT_EQ(rope(heads(0), tables.cos, tables.sin).strides(), at::empty({2, 9, 4, 8}).transpose(1, 2).strides());
  expect_same_function(rope_of(tables, options), rope_chain(tables, options), {wave({8, 9}, 0.1).t()}, 1e-6,
                       "transposed");
  expect_same_function(rope_of(tables, options), rope_chain(tables, options), {wave({1, 9, 8}, 0.1).expand({3, 9, 8})},
                       1e-6, "expanded");
}

TEST(Rope, TablesAreThoseOfTheFormula) {
  const RopeTables tables = rope_tables(3, 4, 100.0);
  EXPECT_EQ(tables.cos.scalar_type(), at::kFloat);
  const at::Tensor angles = at::tensor({0.0, 0.0, 1.0, 0.1, 2.0, 0.2}, at::kDouble).view({3, 2});
  EXPECT_LE(relative_difference(tables.cos, angles.cos()), 1e-7);
  EXPECT_LE(relative_difference(tables.sin, angles.sin()), 1e-7);
}

TEST(Rope, MisuseIsRefused) {
  const RopeTables tables = rope_tables(5, 8);
  const at::Tensor x = wave({2, 5, 8}, 0.1);
  const auto refused = [](const auto& call, const std::string& text) {
    EXPECT_THAT(call, ThrowsMessage<UsageError>(HasSubstr(text)));
  };
  refused([&] { rope(wave({2, 6, 8}, 0), tables.cos, tables.sin); }, "at least 6 positions");
  refused([&] { rope(wave({2, 5, 7}, 0), tables.cos, tables.sin); }, "at most 3 pairs");
  refused([&] { rope(x, tables.cos, tables.sin, {.position_dim = 2}); }, "one of the 2 dimensions before the channels");
  refused([&] { rope(x, tables.cos, tables.sin.narrow(0, 0, 4)); }, "expected cos and sin of");
  refused([&] { rope(x, tables.cos.clone().requires_grad_(true), tables.sin); }, "cos or sin requires one");
  refused([&] { rope(x.to(at::kInt), tables.cos, tables.sin); }, "of Int");
  refused([&] { rope_tables(3, 5); }, "an even number of channels");
  const at::Tensor leaf = x.detach().requires_grad_(true);
  refused([&] { torch::autograd::grad({rope(leaf, tables.cos, tables.sin).sum()}, {leaf}, {}, true, true); },
          "without create_graph");
}

}  // namespace
}  // namespace ds::ops
