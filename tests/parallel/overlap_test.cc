// Sums of gradients beside products of weights (ParallelizeOptions::overlap): the same bits, and in that order.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <string>
#include <vector>

#include "examples/gpt/gpt_init.h"
#include "examples/gpt/gpt_model.h"
#include "parallel/axis/overlap.h"
#include "tests/parallel/llama.h"
#include "tests/parallel/split_ranks.h"

namespace ds::parallel {
namespace {

using enum Style;
using Tensors = std::vector<at::Tensor>;

// Loss, gradients of all leaves, and what was sent.
struct Outcomes {
  Tensors values;
  int64_t bytes = 0;
};

template <class Module>
Outcomes outcomes_of(const std::shared_ptr<Module>& module, comm::Communicator& communicator,
                     const std::vector<SplitRule>& rules, const ParallelizeOptions& options) {
  const SplitModule split = parallelize_module(*module, shared(communicator), rules, options);
  communicator.reset_counters();
  const at::Tensor tokens = (at::arange(2 * 16) * 7 % 64).view({2, 16});
  const at::Tensor loss = module->forward(tokens, tokens.roll(1));
  loss.backward();
  Outcomes result{.values = {loss.detach()}, .bytes = communicator.counters().total_bytes_sent()};
  split.reduce_summed_gradients();
  for (const at::Tensor& leaf : split.leaves()) result.values.push_back(leaf.grad());
  EXPECT_TRUE(split.joined_operators().empty());
  return result;
}

template <class Module>
void expect_same_bits(const std::function<std::shared_ptr<Module>()>& make, const std::vector<SplitRule>& rules) {
  for (const int ranks : {2, 4}) {
    for (const bool cut : {false, true}) {
      test::run_ranks(ranks, [&](comm::Communicator& communicator) {
        const Outcomes expected = outcomes_of(made_alike(make), communicator, rules, {.sequence_parallel = cut});
        const Outcomes found =
            outcomes_of(made_alike(make), communicator, rules, {.sequence_parallel = cut, .overlap = true});
        ASSERT_EQ(found.values.size(), expected.values.size());
        for (size_t i = 0; i < found.values.size(); ++i) {
          EXPECT_TRUE(at::equal(found.values[i], expected.values[i])) << "value " << i << (cut ? ", cut" : "");
        }
        EXPECT_EQ(found.bytes, expected.bytes);
      });
    }
  }
}

std::vector<SplitRule> rules_for_gpt() {
  return {{.pattern = ".*qkv", .style = kColumn, .blocks = {32, 32, 32}},
          {.pattern = ".*attn.proj", .style = kRow},
          {.pattern = ".*fc", .style = kColumn},
          {.pattern = ".*mlp.proj", .style = kRow},
          {.pattern = "wte|head", .style = kVocabulary}};
}

TEST(Overlap, GivesAGptTheSameBits) {
  for (const bool regions : {false, true}) {
    expect_same_bits<gpt::Gpt>(
        [&] {
          auto model = std::make_shared<gpt::Gpt>(gpt::GptConfig{
              .layers = 2, .hidden = 32, .heads = 4, .seq_len = 16, .vocab = 64, .activation_checkpointing = regions});
          gpt::initialize_weights(*model, 3);
          return model;
        },
        rules_for_gpt());
  }
}

TEST(Overlap, GivesALlamaTheSameBits) {
  expect_same_bits<Llama>([] { return std::make_shared<Llama>(LlamaSizes{.vocabulary = 64}); },
                          {{.pattern = ".*[qkv]_proj", .style = kColumn},
                           {.pattern = ".*o_proj", .style = kRow},
                           {.pattern = ".*(gate|up)_proj", .style = kColumn},
                           {.pattern = ".*down_proj", .style = kRow},
                           {.pattern = "embed_tokens|lm_head", .style = kVocabulary}});
}

// The order in which gradients arrive: the weights' between the begin of the sum and the input's.
TEST(Overlap, ComputesTheWeightsGradientWhileTheSumIsUnderWay) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    torch::nn::Linear layer(8, 6);
    const SplitModule split =
        parallelize_module(*layer, shared(communicator), {{.pattern = ".*", .style = kColumn}}, {.overlap = true});
    std::vector<std::string> arrived;
    const at::Tensor x = at::ones({2, 3, 8}).requires_grad_();
    const at::Tensor input = x * 2;
    input.register_hook([&](const at::Tensor& /*gradient*/) {
      arrived.emplace_back("input");
      // Launched before: nothing that this rank computes is still to come.
      EXPECT_EQ(communicator.counters().calls[static_cast<size_t>(comm::CollectiveKind::kAllReduce)], 1);
    });
    communicator.reset_counters();
    split.leaves()[0].register_hook([&](const at::Tensor& /*gradient*/) {
      arrived.emplace_back("weight");
      EXPECT_EQ(communicator.counters().calls[static_cast<size_t>(comm::CollectiveKind::kAllReduce)], 1)
          << "the sum was begun before";
    });
    const at::Tensor loss = whole(layer(input)).pow(2).sum();
    loss.backward();
    EXPECT_EQ(arrived, (std::vector<std::string>{"weight", "input"}));
  });
}

TEST(Overlap, ARankWithoutColumnsTakesPart) {
  const at::Tensor x = at::arange(24, at::kDouble).view({2, 3, 4}).sin();
  const at::Tensor w = at::arange(4, at::kDouble).view({1, 4}).cos();
  const at::Tensor plain = x.clone().requires_grad_();
  at::linear(plain, w).pow(2).sum().backward();
  test::run_ranks(3, [&](comm::Communicator& communicator) {
    const std::shared_ptr<Axis> axis = make_axis(shared(communicator));
    axis->overlap(true);
    const at::Tensor own = x.clone().requires_grad_();
    const at::Tensor weight = w.clone().requires_grad_();
    whole(at::linear(own, split_as(weight, axis, {.dim = 0, .blocks = {}}))).pow(2).sum().backward();
    EXPECT_LE(relative_error(own.grad(), plain.grad()), 1e-12);
  });
}

TEST(Overlap, GradientsOfGradientsAreRight) {
  const at::Tensor values = at::arange(12, at::kDouble).view({3, 4}).sin();
  const auto penalty = [&](torch::nn::Linear& layer, const at::Tensor& x) {
    const at::Tensor y = whole(torch::tanh(layer(x))).pow(2).sum();
    return torch::autograd::grad({y}, {x}, {}, true, /*create_graph=*/true)[0].pow(2).sum();
  };
  torch::nn::Linear reference(4, 6);
  reference->to(at::kDouble);
  {
    const at::NoGradGuard no_grad;
    reference->weight.copy_(at::arange(24, at::kDouble).view({6, 4}).cos());
    reference->bias.zero_();
  }
  const at::Tensor plain = values.clone().requires_grad_();
  penalty(reference, plain).backward();
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    torch::nn::Linear layer(4, 6);
    layer->to(at::kDouble);
    {
      const at::NoGradGuard no_grad;
      layer->weight.copy_(reference->weight);
      layer->bias.zero_();
    }
    const SplitModule split =
        parallelize_module(*layer, shared(communicator), {{.pattern = ".*", .style = kColumn}}, {.overlap = true});
    const at::Tensor own = values.clone().requires_grad_();
    penalty(layer, own).backward();
    EXPECT_LE(relative_error(own.grad(), plain.grad()), 1e-12);
    const at::Tensor truth = slice_of(reference->weight.grad(), placement_of(layer->weight));
    EXPECT_LE(relative_error(split.leaves()[0].grad(), truth), 1e-12);
  });
}

}  // namespace
}  // namespace ds::parallel
