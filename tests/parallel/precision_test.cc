// 16-bit tensors, and autocast: values that fit where the plain operator's fit, and its dtypes.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "examples/gpt/gpt_init.h"
#include "examples/gpt/gpt_model.h"
#include "tests/parallel/split_ranks.h"
#include "tests/support/autocast_scope.h"

namespace ds::parallel {
namespace {

using enum Style;

void on_two_ranks(const std::function<void(const std::shared_ptr<Axis>&)>& body) {
  test::run_ranks(2, [&](comm::Communicator& communicator) { body(make_axis(shared(communicator))); });
}

TEST(Precision, MeansOfHalvesWhoseSumsDoNotFit) {
  on_two_ranks([](const std::shared_ptr<Axis>& axis) {
    const at::Tensor x = at::full({64, 2048}, 30.0, at::kHalf);
    for (const int64_t dim : {0, 1}) {
      const at::Tensor split = distribute(x, axis, dim);
      EXPECT_EQ(split.mean().item<double>(), 30);
      EXPECT_EQ(split.mean().scalar_type(), at::kHalf);
      EXPECT_EQ(whole(split.mean(at::IntArrayRef{1})).max().item<double>(), 30);
      EXPECT_EQ(at::mse_loss(split, at::zeros_like(split)).item<double>(), at::mse_loss(x, x * 0).item<double>());
    }
  });
}

TEST(Precision, LossesOfHalvesWhoseSumsDoNotFit) {
  const at::Tensor target = at::zeros({80'000}, at::kLong);
  at::Tensor scores = at::zeros({80'000, 2}, at::kHalf);
  scores.select(1, 1).fill_(8);
  const double expected = std::log(1 + std::exp(8.0));
  on_two_ranks([&](const std::shared_ptr<Axis>& axis) {
    for (const int64_t dim : {0, 1}) {
      const at::Tensor split = distribute(scores, axis, dim);
      const at::Tensor loss = at::cross_entropy_loss(split, target);
      EXPECT_NEAR(loss.item<double>(), expected, 0.01) << "dimension " << dim;
      EXPECT_EQ(loss.scalar_type(), at::kHalf);
      if (dim == 0) continue;  // joined, and plain torch's is NaN
      EXPECT_NEAR(at::nll_loss_nd(split.log_softmax(1), target).item<double>(), expected, 0.01);
    }
  });
}

TEST(Precision, ResultsUnderAutocastHaveThePlainDtypes) {
  const at::Tensor x = at::arange(48, at::kFloat).view({6, 8}).sin();
  const at::Tensor target = at::arange(6);
  using Run = std::function<at::Tensor(const at::Tensor&)>;
  const std::vector<std::pair<std::string, Run>> runs = {
      {"cross entropy", [&](const at::Tensor& t) { return at::cross_entropy_loss(t, target); }},
      {"cross entropy of rows", [&](const at::Tensor& t) { return at::cross_entropy_loss(t, target, {}, 0); }},
      {"weighted cross entropy",
       [&](const at::Tensor& t) { return at::cross_entropy_loss(t, target, at::arange(1, 9).to(at::kFloat)); }},
      {"nll", [&](const at::Tensor& t) { return at::nll_loss_nd(t.log_softmax(1), target); }},
      {"mse", [](const at::Tensor& t) { return at::mse_loss(t, t * 2); }},
      {"softmax", [](const at::Tensor& t) { return t.softmax(1); }},
      {"log_softmax", [](const at::Tensor& t) { return t.log_softmax(0); }},
      {"sum", [](const at::Tensor& t) { return t.sum(); }},
      {"mean", [](const at::Tensor& t) { return t.mean(at::IntArrayRef{0}); }},
      {"linear", [&](const at::Tensor& t) { return at::linear(t, x, at::ones({6})); }},
      {"addmm", [&](const at::Tensor& t) { return at::addmm(at::ones({6}), t, x.t()); }},
      {"baddbmm",
       [](const at::Tensor& t) {
         return at::baddbmm(at::ones({1, 6, 6}), t.unsqueeze(0), t.t().unsqueeze(0));
       }},
      {"attention",
       [](const at::Tensor& t) {
         const at::Tensor heads = t.view({2, 3, 8, 1});
         return at::scaled_dot_product_attention(heads, heads, heads);
       }},
  };
  on_two_ranks([&](const std::shared_ptr<Axis>& axis) {
    const test::AutocastScope autocast;
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      for (const auto& [name, run] : runs) {
        const at::Tensor plain = x.to(dtype);
        const at::Tensor expected = run(plain);
        for (const int64_t dim : {0, 1}) {
          const at::Tensor found = whole(run(distribute(plain, axis, dim)));
          EXPECT_EQ(found.scalar_type(), expected.scalar_type()) << name << ", " << dtype << ", dimension " << dim;
          EXPECT_LE(relative_error(found, expected), 2e-2) << name << ", " << dtype << ", dimension " << dim;
        }
      }
    }
  });
}

TEST(Precision, AGptUnderAutocastIsThePlainOne) {
  for (const auto& [whole_logits, cut] : {std::pair{false, false}, {true, false}, {true, true}}) {
    gpt::GptConfig config{.layers = 2, .hidden = 64, .heads = 4, .seq_len = 16, .vocab = 96};
    config.whole_logits = whole_logits;
    const auto make = [&] {
      auto model = std::make_shared<gpt::Gpt>(config);
      gpt::initialize_weights(*model, 3);
      return model;
    };
    const at::Tensor tokens = at::arange(32).view({2, 16}) * 5 % 96;
    expect_same_as_whole<gpt::Gpt>(make,
                                   [&](gpt::Gpt& model) {
                                     const test::AutocastScope autocast;
                                     const at::Tensor loss = model.forward(tokens, tokens.flip(1));
                                     EXPECT_EQ(loss.scalar_type(), at::kFloat);
                                     return loss;
                                   },
                                   {.ranks = 2,
                                    .rules = {{.pattern = ".*qkv", .style = kColumn, .blocks = {64, 64, 64}},
                                              {.pattern = ".*attn.proj", .style = kRow},
                                              {.pattern = ".*fc", .style = kColumn},
                                              {.pattern = ".*mlp.proj", .style = kRow},
                                              {.pattern = "wte|head", .style = kVocabulary}},
                                    .tolerance = 3e-2,
                                    .sequence_parallel = cut,
                                    .overlap = cut});
  }
}

}  // namespace
}  // namespace ds::parallel
