// Operations of operators by hand, and whose they are.
#include "profiling/module_work.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <map>
#include <string>

#include "core/text.h"
#include "dsengine/activation_checkpoint.h"
#include "profiling/peak_rate.h"

namespace ds::profiling {
namespace {

using Counts = std::map<std::string, ModuleFlops>;

Counts counts_of(const torch::nn::Module& module, const std::function<void()>& run) {
  ModuleWork work(module);
  work.start();
  run();
  work.stop();
  EXPECT_THAT(work.unknown_operators(), ::testing::IsEmpty());
  Counts counts;
  for (ModuleFlops& row : work.rows()) counts.emplace(row.name, row);
  return counts;
}

// Of operators without a module.
ModuleFlops counts_of(const std::function<void()>& run) { return counts_of(*torch::nn::ModuleList(), run).at(""); }

TEST(OperatorWork, ProductsOfMatrices) {
  const at::Tensor a = torch::ones({4, 6});
  const at::Tensor b = torch::ones({6, 11});
  const auto product = counts_of([&] { a.mm(b); });
  EXPECT_EQ(product.macs, 4 * 6 * 11);
  EXPECT_EQ(product.flops, 2 * 4 * 6 * 11);
  EXPECT_EQ(counts_of([&] { torch::addmm(torch::ones({11}), a, b); }).macs, 4 * 6 * 11);
  EXPECT_EQ(counts_of([&] { a.mv(torch::ones({6})); }).macs, 4 * 6);
  EXPECT_EQ(counts_of([&] { a.flatten().dot(a.flatten()); }).macs, 24);
  EXPECT_EQ(counts_of([&] { torch::matmul(torch::ones({2, 3, 4, 6}), b); }).macs, 2 * 3 * 4 * 6 * 11);
  EXPECT_EQ(counts_of([&] {
              torch::einsum("bij,bkj->bik", {torch::ones({3, 4, 5}), torch::ones({3, 7, 5})});
            }).macs,
            3 * 4 * 5 * 7);
}

// Backward of attention counts as twice forward, and a causal mask leaves half of the pairs.
TEST(UsefulFlops, AreThoseThatTrainingNeeds) {
  const auto useful = [](bool is_causal) {
    const torch::nn::ModuleList none;
    ModuleWork work(*none);
    const at::Tensor input = torch::ones({2, 3, 8, 5}).requires_grad_();
    work.start();
    torch::scaled_dot_product_attention(input, input, input, {}, 0.0, is_causal).sum().backward();
    work.stop();
    return work.useful_flops();
  };
  constexpr double kPairs = 2 * 3 * 8 * 8;
  constexpr double kForward = 2 * kPairs * (5 + 5);
  EXPECT_EQ(useful(false).full, 3 * kForward);
  EXPECT_EQ(useful(false).causal, 3 * kForward);
  EXPECT_EQ(useful(true).full, 3 * kForward);
  EXPECT_EQ(useful(true).causal, 3 * kForward / 2);
}

TEST(MeasuredPeak, IsTheRateOfAProduct) {
  const double peak = measured_peak(at::kCPU, at::kFloat);
  EXPECT_GT(peak, 1e7) << "operations a second";
  EXPECT_LT(peak, 1e15);
}

TEST(OperatorWork, PointwiseOfTheBroadcastResult) {
  const at::Tensor a = torch::ones({4, 1, 6});
  EXPECT_EQ(counts_of([&] { a + torch::ones({5, 1}); }).flops, 4 * 5 * 6);
  EXPECT_EQ(counts_of([&] { torch::gelu(a); }).flops, 24);
  EXPECT_EQ(counts_of([&] { a.mul(2).add_(1); }).flops, 48);
  EXPECT_EQ(counts_of([&] { a.softmax(-1); }).flops, 24);
  const auto copies = counts_of([&] { a.to(torch::kDouble).clone().fill_(1).transpose(0, 2).contiguous(); });
  EXPECT_EQ(copies.flops, 0);
}

TEST(OperatorWork, Normalizations) {
  const at::Tensor x = torch::ones({4, 6});
  torch::nn::LayerNorm norm(torch::nn::LayerNormOptions({6}));
  EXPECT_EQ(counts_of(*norm, [&] { norm(x); }).at("").flops, 5 * 24);
  EXPECT_EQ(counts_of([&] { torch::layer_norm(x, {6}); }).flops, 4 * 24);
  torch::nn::BatchNorm1d batch(6);
  EXPECT_EQ(counts_of(*batch, [&] { batch(x); }).at("").flops, 5 * 24 + 1) << "and counts its batches";
  batch->eval();
  EXPECT_EQ(counts_of(*batch, [&] { batch(x); }).at("").flops, 2 * 24);
}

TEST(OperatorWork, ConvolutionsAndTheirGradients) {
  const at::Tensor image = torch::ones({2, 4, 10, 9}, torch::requires_grad());
  torch::nn::Conv2d conv(torch::nn::Conv2dOptions(4, 8, {3, 2}).stride({2, 1}).padding({1, 0}).groups(2));
  constexpr int64_t kPlaces = 5 * 8;  // (10 + 2 - 3) / 2 + 1, 9 - 2 + 1
  constexpr int64_t kMacs = 2 * kPlaces * 8 * (4 / 2) * 3 * 2;
  const auto counts = counts_of(*conv, [&] { conv(image).sum().backward(); }).at("");
  EXPECT_EQ(counts.macs, kMacs);
  EXPECT_EQ(counts.backward_macs, 2 * kMacs);
  const auto weight_alone = counts_of(*conv, [&] { conv(image.detach()).sum().backward(); }).at("");
  EXPECT_EQ(weight_alone.backward_macs, kMacs);
  torch::nn::ConvTranspose1d up(torch::nn::ConvTranspose1dOptions(3, 5, 4).stride(2));
  EXPECT_EQ(counts_of(*up, [&] { up(torch::ones({2, 3, 7})); }).at("").macs, 2 * 7 * 3 * 5 * 4);
}

TEST(OperatorWork, AttentionOfAllPairs) {
  const auto tensor = [](int64_t length, int64_t width) {
    return torch::ones({2, 3, length, width}, torch::requires_grad());
  };
  const at::Tensor query = tensor(5, 8);
  const at::Tensor key = tensor(7, 8);
  const at::Tensor value = tensor(7, 8);
  constexpr int64_t kPairs = 2 * 3 * 5 * 7;
  const auto counts = counts_of([&] { torch::scaled_dot_product_attention(query, key, value).sum().backward(); });
  EXPECT_EQ(counts.macs, kPairs * 2 * 8);
  // Scores again, or the same without them where LibTorch has kept them.
  EXPECT_THAT(counts.backward_macs, ::testing::AnyOf(kPairs * 5 * 8, kPairs * 4 * 8));
}

struct BlockImpl : torch::nn::Module {
  BlockImpl()
      : norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({8})))),
        wide(register_module("wide", torch::nn::Linear(8, 16))),
        narrow(register_module("narrow", torch::nn::Linear(16, 8))) {}
  at::Tensor forward(const at::Tensor& x) { return x + narrow(torch::gelu(wide(norm(x)))); }
  torch::nn::LayerNorm norm;
  torch::nn::Linear wide, narrow;
};
TORCH_MODULE(Block);

struct TiedHead : torch::nn::Module {
  explicit TiedHead(const at::Tensor& tied) : weight(register_parameter("weight", tied)) {}
  at::Tensor forward(const at::Tensor& x) const { return torch::linear(x, weight); }
  at::Tensor weight;
};

struct ModelImpl : torch::nn::Module {
  ModelImpl()
      : table(register_module("table", torch::nn::Embedding(10, 8))),
        first(register_module("first", Block())),
        second(register_module("second", Block())),
        head(register_module("head", std::make_shared<TiedHead>(table->weight))) {}
  at::Tensor forward(const at::Tensor& tokens, bool recompute) {
    at::Tensor x = table(tokens);
    for (Block& block : {std::ref(first), std::ref(second)}) {
      x = recompute ? recompute::checkpoint([&block](const at::Tensor& h) { return block(h); }, x) : block(x);
    }
    return head->forward(x);
  }
  torch::nn::Embedding table;
  Block first, second;
  std::shared_ptr<TiedHead> head;
};
TORCH_MODULE(Model);

constexpr int64_t kTokens = 2 * 3;
constexpr int64_t kOfALinear = kTokens * 8 * 16;
constexpr int64_t kOfABlock = 2 * kOfALinear;
constexpr int64_t kOfTheHead = kTokens * 8 * 10;

void train(Model& model, bool recompute) {
  const at::Tensor tokens = torch::arange(kTokens).view({2, 3});
  model(tokens, recompute).square().mean().backward();
}

TEST(ModuleWork, ForwardAndBackwardOfEachModule) {
  Model model;
  const Counts counts = counts_of(*model, [&] { train(model, /*recompute=*/false); });
  for (const std::string block : {"first", "second"}) {
    EXPECT_EQ(counts.at(block).macs, kOfABlock);
    EXPECT_EQ(counts.at(block + ".wide").macs, kOfALinear);
    EXPECT_EQ(counts.at(block + ".wide").flops, 2 * kOfALinear + kTokens * 16) << "with its bias";
    EXPECT_EQ(counts.at(block + ".norm").flops, 5 * kTokens * 8);
    // GELU is the block's own. The sum with the input, after its last parameter, is of the model around it.
    EXPECT_EQ(counts.at(block).flops, 2 * kOfABlock + kTokens * (5 * 8 + 16 + 16 + 8));
    EXPECT_EQ(counts.at(block).backward_macs, 2 * kOfABlock);
    EXPECT_EQ(counts.at(block + ".narrow").backward_macs, 2 * kOfALinear);
    EXPECT_GT(counts.at(block + ".norm").backward_flops, 0);
  }
  EXPECT_EQ(counts.at("").macs, 2 * kOfABlock + kOfTheHead);
  EXPECT_EQ(counts.at("").backward_macs, 2 * counts.at("").macs);
  EXPECT_EQ(counts.at("").recomputed_flops, 0);
  EXPECT_EQ(counts.at("table").flops, 0) << "a lookup";
  EXPECT_EQ(counts.at("head").macs, kOfTheHead) << "the table's weight, but not looked up";
  EXPECT_EQ(counts.at("").parameters, 10 * 8 + 2 * (16 + 8 * 16 + 16 + 16 * 8 + 8));
  EXPECT_EQ(counts.at("head").parameters, 0) << "counted where it comes first";
  EXPECT_GT(counts.at("first").seconds, 0);
  EXPECT_LE(counts.at("first").seconds, counts.at("").seconds);
}

TEST(ModuleWork, RecomputedOnesAreCountedApart) {
  Model model;
  const Counts plain = counts_of(*model, [&] { train(model, /*recompute=*/false); });
  const Counts again = counts_of(*model, [&] { train(model, /*recompute=*/true); });
  EXPECT_EQ(again.at("").macs, plain.at("").macs);
  EXPECT_EQ(again.at("").backward_macs, plain.at("").backward_macs);
  EXPECT_EQ(again.at("first").backward_macs, plain.at("first").backward_macs);
  // What nobody needs is not computed again: the sum at the end.
  EXPECT_GE(again.at("first").recomputed_flops, 2 * kOfABlock);
  EXPECT_LE(again.at("first").recomputed_flops, plain.at("first").flops);
  EXPECT_GT(again.at("first").recomputed_flops, again.at("first.wide").recomputed_flops +
                                                    again.at("first.norm").recomputed_flops +
                                                    again.at("first.narrow").recomputed_flops)
      << "GELU";
}

TEST(ModuleWork, NothingOutsideOfTheWatch) {
  Model model;
  ModuleWork work(*model);
  train(model, false);
  work.start();
  work.pause_forward(true);
  train(model, false);
  work.stop();
  train(model, false);
  EXPECT_EQ(work.rows().front().macs, 0) << "paused";
  EXPECT_EQ(work.rows().front().backward_macs, 2 * (2 * kOfABlock + kOfTheHead)) << "once";
  work.start();
  for (int i = 0; i < 3; ++i) train(model, false);
  work.stop();
  EXPECT_EQ(work.rows(/*times=*/3).front().macs, 2 * kOfABlock + kOfTheHead) << "anew, for each of three";
}

at::Tensor opaque(const at::Tensor& x) { return at::empty_like(x); }
at::Tensor composite(const at::Tensor& x) { return x.mm(x); }

TORCH_LIBRARY(module_work_test, library) {
  library.def("opaque(Tensor x) -> Tensor", &opaque);
  library.def("composite(Tensor x) -> Tensor", &composite);
}

// An operator of the program, of which nothing is known and which calls none that is.
TEST(ModuleWork, UnknownOperatorsAreNamed) {
  ModuleWork work(*torch::nn::ModuleList());
  work.start();
  for (const char* name : {"opaque", "composite"}) {
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(cat("module_work_test::", name).c_str(), "");
    op.typed<at::Tensor(const at::Tensor&)>().call(torch::ones({3, 3}));
  }
  work.stop();
  EXPECT_THAT(work.unknown_operators(), ::testing::ElementsAre("module_work_test::opaque"));
  EXPECT_EQ(work.rows().front().macs, 27);
}

TEST(ModuleWork, GradientsWithRespectToInputsAlone) {
  Model model;
  for (at::Tensor& parameter : model->parameters()) parameter.requires_grad_(false);
  const auto counts = counts_of(*model, [&] {
    const at::Tensor x = torch::ones({2, 3, 8}, torch::requires_grad());
    model->first(x).sum().backward();
  });
  EXPECT_EQ(counts.at("first").macs, kOfABlock);
  EXPECT_EQ(counts.at("first").backward_macs, kOfABlock);
}

}  // namespace
}  // namespace ds::profiling
