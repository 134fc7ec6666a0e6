// Megatron's sequence parallelism: between row and column layers each rank has its tokens alone.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "dsengine/activation_checkpoint.h"
#include "dsengine/errors.h"
#include "examples/gpt/gpt_init.h"
#include "examples/gpt/gpt_model.h"
#include "tests/parallel/encoder_layer.h"
#include "tests/parallel/llama.h"
#include "tests/parallel/split_ranks.h"

namespace ds::parallel {
namespace {

using enum Style;
using ::testing::HasSubstr;

gpt::GptConfig gpt_of(bool tied, int64_t time = 32) {
  return {.layers = 2, .hidden = 64, .heads = 4, .seq_len = time, .vocab = 96, .tie_embeddings = tied};
}

std::vector<SplitRule> rules_of_gpt(bool tied) {
  return {{.pattern = ".*qkv", .style = kColumn, .blocks = {64, 64, 64}},
          {.pattern = ".*attn.proj", .style = kRow},
          {.pattern = ".*fc", .style = kColumn},
          {.pattern = ".*mlp.proj", .style = kRow},
          {.pattern = tied ? "wte" : "wte|head", .style = kVocabulary}};
}

std::shared_ptr<gpt::Gpt> new_gpt(const gpt::GptConfig& config) {
  auto model = std::make_shared<gpt::Gpt>(config);
  gpt::initialize_weights(*model, 3);
  return model;
}

at::Tensor tokens_of(int64_t sequences, int64_t time) {
  return (at::arange(sequences * time) * 7 % 96).view({sequences, time});
}

void expect_cut_gpt(const gpt::GptConfig& config, SplitCase wanted) {
  wanted.sequence_parallel = true;
  const at::Tensor tokens = tokens_of(2, config.seq_len);
  expect_same_as_whole<gpt::Gpt>([&] { return new_gpt(config); },
                                 [&](gpt::Gpt& model) { return model.forward(tokens, tokens.roll(1)); }, wanted);
}

TEST(SequenceParallel, GptIsTheWholeOne) {
  for (const int ranks : {2, 4}) {
    for (const bool tied : {false, true}) {
      expect_cut_gpt(gpt_of(tied), {.ranks = ranks, .rules = rules_of_gpt(tied)});
    }
  }
}

TEST(SequenceParallel, GptWithRegionsThatAreComputedAgain) {
  gpt::GptConfig config = gpt_of(false);
  config.activation_checkpointing = true;
  for (const int ranks : {2, 4}) expect_cut_gpt(config, {.ranks = ranks, .rules = rules_of_gpt(false)});
}

TEST(SequenceParallel, GptWithWholeLogitsAndAWholeVocabulary) {
  gpt::GptConfig config = gpt_of(false);
  config.whole_logits = true;
  std::vector<SplitRule> rules = rules_of_gpt(false);
  expect_cut_gpt(config, {.ranks = 2, .rules = rules});
  rules.pop_back();
  expect_cut_gpt(config, {.ranks = 2, .rules = rules});
  config.activation_checkpointing = true;
  expect_cut_gpt(config, {.ranks = 2, .rules = rules});
}

// Sums that do not divide stay whole, and parameters are summed ones all the same.
TEST(SequenceParallel, AnUnevenNumberOfTokensIsAddedUpWhole) {
  expect_cut_gpt(gpt_of(false, 31), {.ranks = 2, .rules = rules_of_gpt(false)});
}

TEST(SequenceParallel, WithASenselessPlan) {
  const std::vector<SplitRule> rules = {
      {.pattern = ".*qkv", .style = kColumn},    {.pattern = ".*attn.proj", .style = kColumn},
      {.pattern = ".*fc.weight", .style = kRow}, {.pattern = ".*mlp.proj.weight", .style = kRow},
      {.pattern = "wpe", .style = kRow},         {.pattern = ".*ln1.weight", .style = kColumn}};
  expect_cut_gpt(gpt_of(false), {.ranks = 2, .rules = rules, .joins = true});
}

TEST(SequenceParallel, ModulesWithoutSplitParametersAreRightToo) {
  expect_cut_gpt(gpt_of(false), {.ranks = 2, .rules = {}});
}

TEST(SequenceParallel, EveryRuleAgreesWithJoinedTensors) {
  expect_cut_gpt(gpt_of(false, 16), {.ranks = 2, .rules = rules_of_gpt(false), .verify = true});
}

TEST(SequenceParallel, Llama) {
  const at::Tensor tokens = tokens_of(2, 24);
  const std::vector<SplitRule> rules = {{.pattern = ".*[qkv]_proj", .style = kColumn},
                                        {.pattern = ".*o_proj", .style = kRow},
                                        {.pattern = ".*(gate|up)_proj", .style = kColumn},
                                        {.pattern = ".*down_proj", .style = kRow},
                                        {.pattern = "embed_tokens|lm_head", .style = kVocabulary}};
  const auto make = [] {
    auto model = std::make_shared<ds::parallel::Llama>();
    model->to(at::kDouble);
    return model;
  };
  for (const int ranks : {2, 4}) {
    expect_same_as_whole<ds::parallel::Llama>(
        make, [&](ds::parallel::Llama& model) { return model.forward(tokens, tokens.roll(1)); },
        {.ranks = ranks, .rules = rules, .tolerance = 1e-12, .sequence_parallel = true});
  }
}

TEST(SequenceParallel, TransformerEncoderLayer) {
  // The second last dimension of what the layer adds up are the sequences.
  const at::Tensor x = at::arange(10 * 4 * 64, at::kFloat).view({10, 4, 64}).sin();
  for (const int ranks : {2, 4}) {
    expect_same_as_whole<EncoderLayer>(new_encoder_layer,
                                       [&](EncoderLayer& layer) { return (layer.forward(x) * x).sum(); },
                                       {.ranks = ranks, .rules = rules_of_encoder_layer(), .sequence_parallel = true});
  }
}

// The same values before and after steps of AdamW with clipping: whole parameters stay the same on all ranks.
TEST(SequenceParallel, TrainsAsTheWholeModelDoes) {
  const gpt::GptConfig config = gpt_of(true);
  const at::Tensor tokens = tokens_of(2, 32);
  const auto train = [&](gpt::Gpt& model, const std::vector<at::Tensor>& parameters, const auto& clip) {
    torch::optim::AdamW optimizer(parameters, torch::optim::AdamWOptions(1e-3));
    std::vector<double> losses;
    for (int step = 0; step < 20; ++step) {
      optimizer.zero_grad();
      for (const int64_t shift : {1, 2}) {  // accumulated
        const at::Tensor loss = model.forward(tokens, tokens.roll(shift));
        loss.backward();
        losses.push_back(loss.item<double>());
      }
      losses.push_back(clip());
      optimizer.step();
    }
    return losses;
  };
  const auto reference = new_gpt(config);
  const std::vector<double> expected = train(*reference, reference->parameters(), [&] {
    return torch::nn::utils::clip_grad_norm_(reference->parameters(), 0.5);
  });
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    const auto model = new_gpt(config);
    const SplitModule split =
        parallelize_module(*model, shared(communicator), rules_of_gpt(true), {.sequence_parallel = true});
    const std::vector<double> losses = train(*model, split.leaves(), [&] { return split.clip_grad_norm_(0.5); });
    for (size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(losses[i], expected[i], 1e-4 * expected[i]) << i;
    for (const auto& [name, leaf] : split.summed_leaves()) {
      EXPECT_LE(relative_error(leaf, reference->named_parameters()[name]), 1e-4) << name;
    }
  });
}

TEST(SequenceParallel, SaysWhichGradientsAreParts) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    const auto model = new_gpt(gpt_of(false, 16));
    const SplitModule split =
        parallelize_module(*model, shared(communicator), rules_of_gpt(false), {.sequence_parallel = true});
    std::vector<std::string> names;
    for (const auto& [name, leaf] : split.summed_leaves()) names.push_back(name);
    EXPECT_THAT(names, ::testing::IsSupersetOf({"wpe.weight", "h.0.ln1.weight", "h.1.attn.proj.bias", "ln_f.bias"}));
    EXPECT_THAT(names, ::testing::Not(::testing::Contains("h.0.attn.qkv.bias")));
    EXPECT_THAT(describe(split.plan), HasSubstr("its gradient is a sum over the ranks"));
    const at::Tensor tokens = tokens_of(2, 16);
    model->forward(tokens, tokens).backward();
    split.reduce_summed_gradients();
    const at::Tensor once = split.summed_leaves()[0].second.grad().clone();
    split.reduce_summed_gradients();
    EXPECT_EQ(relative_error(split.summed_leaves()[0].second.grad(), once), 0) << "nothing has arrived since";
    try {
      model->forward(tokens, tokens).backward();
      ADD_FAILURE() << "a gradient was added to one that is whole";
    } catch (const UsageError& error) {
      EXPECT_THAT(error.what(), HasSubstr("zero_grad()"));
    }
    split.zero_grad();
    model->forward(tokens, tokens).backward();
    for (const at::Tensor& leaf : split.leaves()) leaf.mutable_grad().zero_();  // as optimizers may
    model->forward(tokens, tokens).backward();
    split.reduce_summed_gradients();
    EXPECT_LE(relative_error(split.summed_leaves()[0].second.grad(), once), 1e-6);
  });
}

// Two losses of other leaves, each with a sum of its own: what was added up before counts once.
TEST(SequenceParallel, ASecondSumLeavesGradientsThatGotNothingNew) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    const auto model = new_gpt(gpt_of(false, 16));
    const SplitModule split =
        parallelize_module(*model, shared(communicator), rules_of_gpt(false), {.sequence_parallel = true});
    const at::Tensor tokens = tokens_of(2, 16);
    model->forward(tokens, tokens).backward();
    split.reduce_summed_gradients();
    at::Tensor first, other;
    for (const auto& [name, leaf] : split.summed_leaves()) {
      if (name == "ln_f.weight") first = leaf;
      if (name == "ln_f.bias") other = leaf;
    }
    const at::Tensor once = first.grad().clone();
    other.mutable_grad().reset();
    model->named_parameters()["ln_f.bias"].square().sum().backward();
    split.reduce_summed_gradients();
    EXPECT_EQ(relative_error(first.grad(), once), 0);
    EXPECT_LE(relative_error(other.grad(), other.detach() * 2), 1e-6);
  });
}

// Whole parameters are read and changed as others are.
TEST(SequenceParallel, WholeParametersAreTensorsAsBefore) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    torch::nn::LayerNorm norm(torch::nn::LayerNormOptions({4}));
    const SplitModule split = parallelize_module(*norm, shared(communicator), {}, {.sequence_parallel = true});
    {
      const at::NoGradGuard no_grad;
      norm->weight.mul_(3).add_(1);
      norm->weight.view({2, 2}).narrow(0, 0, 1).fill_(2);
    }
    EXPECT_EQ(relative_error(split.leaves()[0], at::tensor({2.0, 2.0, 4.0, 4.0})), 0);
    EXPECT_EQ(norm->weight.sum().item<double>(), 12);
    EXPECT_EQ(relative_error(whole(norm->weight), split.leaves()[0]), 0);
    // Twice over: by an operator on parts (rows of x), by plain ones, and by what is made of it.
    const at::Tensor x = distribute(at::arange(8, at::kFloat).view({2, 4}), split.axis, 0);
    const at::Tensor loss = (x * norm->weight).sum() + (norm->weight * 5).sum() + norm->weight.pow(2).sum() +
                            (x * (norm->weight.view({2, 2}).t() + 1).reshape({4})).sum();
    loss.backward();
    split.reduce_summed_gradients();
    const at::Tensor columns = at::tensor({4.0, 6.0, 8.0, 10.0});
    const at::Tensor expected = columns + 5 + split.leaves()[0] * 2 + columns.view({2, 2}).t().contiguous().view({4});
    EXPECT_LE(relative_error(split.leaves()[0].grad(), expected), 1e-6);
    EXPECT_TRUE(split.joined_operators().empty());
    // And in place, of a tensor that is made of it.
    split.zero_grad();
    const at::Tensor scale = norm->weight * 2;
    scale.add_(1).mul_(at::full({4}, 3.0));
    (x * scale).sum().backward();
    split.reduce_summed_gradients();
    EXPECT_LE(relative_error(split.leaves()[0].grad(), columns * 6), 1e-6);
  });
}

struct Scale : torch::autograd::Function<Scale> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& w) {
    context->save_for_backward({x, w});
    return x * w;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto saved = context->get_saved_variables();
    return {gradients[0] * saved[1], (gradients[0] * saved[0]).sum(0)};
  }
};

TEST(SequenceParallel, AutogradFunctionsOfTheProgramReadWholeParameters) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    torch::nn::LayerNorm norm(torch::nn::LayerNormOptions({4}));
    const SplitModule split = parallelize_module(*norm, shared(communicator), {}, {.sequence_parallel = true});
    const at::Tensor values = at::arange(8, at::kFloat).view({2, 4});
    const at::Tensor columns = at::tensor({4.0, 6.0, 8.0, 10.0});
    for (const bool cut : {false, true}) {
      split.zero_grad();
      const at::Tensor x = cut ? distribute(values, split.axis, 0) : values;
      const at::Tensor loss = Scale::apply(x, norm->weight).sum();
      loss.backward();
      split.reduce_summed_gradients();
      EXPECT_LE(relative_error(split.leaves()[0].grad(), columns), 1e-6) << cut;
    }
  });
}

}  // namespace
}  // namespace ds::parallel
