// Unmodified modules on batches whose positions are cut over ranks, beside the same modules in one process.
#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "dsengine/activation_checkpoint.h"
#include "dsengine/errors.h"
#include "dsengine/sequence_attention.h"
#include "examples/gpt/gpt_init.h"
#include "examples/gpt/gpt_model.h"
#include "tests/parallel/llama.h"
#include "tests/parallel/split_ranks.h"
#include "tests/support/grid.h"

namespace ds::parallel {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr SequenceMethod kMethods[] = {SequenceMethod::kAuto, SequenceMethod::kUlysses, SequenceMethod::kRing};
constexpr SequenceOrder kOrders[] = {SequenceOrder::kContiguous, SequenceOrder::kZigzag};

std::string described(int ranks, const SequenceAxisOptions& options) {
  return std::to_string(ranks) + " ranks, attention " + std::to_string(static_cast<int>(options.attention)) +
         ", order " + std::to_string(static_cast<int>(options.order));
}

at::Tensor numbers(int which, c10::IntArrayRef sizes) {
  return (torch::arange(c10::multiply_integers(sizes), torch::kDouble) * (0.37 + 0.11 * which)).sin().view(sizes);
}

// ---- one attention ----

struct AttentionCase {
  std::string name;
  int64_t positions = 12;
  int64_t heads = 6, key_heads = 6;
  bool causal = false;
  at::Tensor mask = {};
  int64_t keys = 0;  // 0: as many as positions
};

std::vector<AttentionCase> attention_cases() {
  const at::Tensor causal = torch::ones({12, 12}, torch::kBool).tril();
  return {{.name = "full"},
          {.name = "causal", .causal = true},
          {.name = "uneven", .positions = 13, .causal = true},
          {.name = "grouped heads", .key_heads = 2, .causal = true},
          {.name = "one head of keys", .key_heads = 1},
          {.name = "a triangle of booleans", .mask = causal},
          {.name = "terms for each head", .key_heads = 3, .mask = numbers(5, {1, 6, 12, 12}) + 0.0},
          {.name = "padding", .mask = torch::arange(12).lt(9).view({1, 1, 1, 12}).expand({2, 1, 1, 12})},
          {.name = "other keys", .causal = true, .keys = 7}};
}

at::Tensor attended(const AttentionCase& one, const std::vector<at::Tensor>& qkv, const at::Tensor& mask) {
  return at::scaled_dot_product_attention(qkv[0], qkv[1], qkv[2],
                                          mask.defined() ? std::optional<at::Tensor>(mask) : std::nullopt, 0.0,
                                          one.causal, std::nullopt, one.heads != one.key_heads);
}

std::vector<at::Tensor> inputs_of(const AttentionCase& one) {
  const int64_t keys = one.keys == 0 ? one.positions : one.keys;
  return {numbers(0, {2, one.heads, one.positions, 4}).requires_grad_(),
          numbers(1, {2, one.key_heads, keys, 4}).requires_grad_(),
          numbers(2, {2, one.key_heads, keys, 4}).requires_grad_()};
}

void expect_attention_of_one_process(const AttentionCase& one, int ranks, const SequenceAxisOptions& options) {
  SCOPED_TRACE(one.name + ", " + described(ranks, options));
  const at::Tensor weights = numbers(3, {2, one.heads, one.positions, 4});
  std::vector<at::Tensor> inputs = inputs_of(one);
  at::Tensor bias = one.mask;
  if (bias.defined() && bias.is_floating_point()) inputs.push_back(bias.detach().clone().requires_grad_());
  const at::Tensor expected = attended(one, inputs, inputs.size() == 4 ? inputs[3] : bias);
  const auto truth = torch::autograd::grad({(expected * weights).sum()}, inputs);
  test::run_ranks(ranks, [&](comm::Communicator& group) {
    const auto axis = make_sequence_axis(shared(group), options);
    std::vector<at::Tensor> own = inputs_of(one);
    if (inputs.size() == 4) own.push_back(bias.detach().clone().requires_grad_());
    std::vector<at::Tensor> cut = {cut_sequence(own[0], axis, 2), cut_sequence(own[1], axis, 2),
                                   cut_sequence(own[2], axis, -2)};
    const at::Tensor out = attended(one, cut, own.size() == 4 ? own[3] : bias);
    EXPECT_TRUE(is_split(out));
    EXPECT_LT(relative_error(whole(out), expected), 1e-12);
    const auto gradients = torch::autograd::grad({whole((out * weights).sum())}, own);
    for (size_t i = 0; i < own.size(); ++i) EXPECT_LT(relative_error(gradients[i], truth[i]), 1e-12) << i;
  });
}

TEST(SequenceModels, AttentionOfEveryKindIsThatOfOneProcess) {
  for (const auto& [one, ranks, method, order] :
       ds::test::grid_sample(2, attention_cases(), std::vector<int>{2, 3},
                             std::vector<SequenceMethod>(std::begin(kMethods), std::end(kMethods)),
                             std::vector<SequenceOrder>(std::begin(kOrders), std::end(kOrders)))) {
    expect_attention_of_one_process(one, ranks, {.attention = method, .order = order});
  }
}

// ---- models ----

struct SequenceBatch {
  at::Tensor tokens, labels;
};

SequenceBatch batch_of(int64_t positions) {
  const at::Tensor tokens = (torch::arange(2 * positions) * 7 % 96).view({2, positions});
  at::Tensor labels = tokens.roll(-1, 1).clone();
  labels.narrow(1, positions - 1, 1).fill_(-100);
  labels[1].narrow(0, positions / 2, 4).fill_(-100);  // ranks have other counts
  return {.tokens = tokens, .labels = labels};
}

// Loss, gradients and results of a module on cut batches are those of one process.
template <class Module>
void expect_model_of_one_process(const std::function<std::shared_ptr<Module>()>& make,
                                 const std::function<at::Tensor(Module&, const SequenceBatch&)>& loss_of,
                                 const SequenceBatch& batch, int ranks, const SequenceAxisOptions& options,
                                 bool joins = false) {
  SCOPED_TRACE(described(ranks, options));
  const std::shared_ptr<Module> reference = made_alike(make);
  const at::Tensor expected = loss_of(*reference, batch);
  expected.backward();
  const auto gradients = reference->named_parameters();
  test::run_ranks(ranks, [&](comm::Communicator& group) {
    const std::shared_ptr<Module> module = made_alike(make);
    const auto axis = make_sequence_axis(shared(group), options);
    const SplitModule split = parallelize_sequence(*module, axis);
    const at::Tensor loss =
        loss_of(*module, {.tokens = cut_sequence(batch.tokens, axis), .labels = cut_sequence(batch.labels, axis)});
    EXPECT_FALSE(is_split(loss));
    EXPECT_LT(relative_error(loss, expected), 1e-12);
    loss.backward();
    split.reduce_summed_gradients();
    EXPECT_EQ(split.summed_leaves().size(), split.named_leaves.size());
    for (const auto& [name, leaf] : split.named_leaves) {
      EXPECT_LT(relative_error(leaf.grad(), gradients[name].grad()), 1e-11) << name << ", rank " << group.rank();
    }
    std::string joined;
    for (const JoinedOperator& op : split.joined_operators()) joined += op.name + " ";
    EXPECT_EQ(joined.empty(), !joins) << "joined: " << joined;
  });
}

std::shared_ptr<gpt::Gpt> new_model_of_sequences(const gpt::GptConfig& config) {
  auto model = std::make_shared<gpt::Gpt>(config);
  gpt::initialize_weights(*model, 3);
  model->to(torch::kDouble);
  return model;
}

gpt::GptConfig small_gpt() { return {.layers = 2, .hidden = 48, .heads = 6, .seq_len = 24, .vocab = 96}; }

at::Tensor loss_of_gpt(gpt::Gpt& model, const SequenceBatch& batch) {
  return model.forward(batch.tokens, batch.labels);
}

TEST(SequenceModels, GptIsThatOfOneProcess) {
  for (const int ranks : {2, 3}) {
    for (const SequenceMethod method : {SequenceMethod::kUlysses, SequenceMethod::kRing}) {
      for (const SequenceOrder order : kOrders) {
        expect_model_of_one_process<gpt::Gpt>([] { return new_model_of_sequences(small_gpt()); }, loss_of_gpt,
                                              batch_of(24), ranks, {.attention = method, .order = order});
      }
    }
  }
}

TEST(SequenceModels, GptOfOddLengthWithTiedVocabularyAndRegions) {
  gpt::GptConfig config = small_gpt();
  config.tie_embeddings = true;
  config.activation_checkpointing = true;
  for (const SequenceOrder order : kOrders) {
    expect_model_of_one_process<gpt::Gpt>([&] { return new_model_of_sequences(config); }, loss_of_gpt, batch_of(23), 3,
                                          {.order = order});
  }
}

// Rotary positions from the number of tokens, and groups of heads that share keys.
TEST(SequenceModels, LlamaIsThatOfOneProcess) {
  const auto make = [] {
    auto model = std::make_shared<Llama>(LlamaSizes{.hidden = 48, .heads = 6, .groups = 2, .inner = 64});
    model->to(torch::kDouble);
    return model;
  };
  const auto loss_of = [](Llama& model, const SequenceBatch& batch) {
    return model.forward(batch.tokens, batch.labels);
  };
  for (const int ranks : {2, 3}) {
    for (const SequenceMethod method : {SequenceMethod::kUlysses, SequenceMethod::kRing}) {
      for (const SequenceOrder order : kOrders) {
        expect_model_of_one_process<Llama>(make, loss_of, batch_of(24), ranks, {.attention = method, .order = order});
      }
    }
  }
}

// ---- what sees other positions by itself ----

// Operators over positions in a row, each of them wrong on a rank's own positions alone.
struct Positions : torch::nn::Module {
  Positions() {
    embedding = register_module("embedding", torch::nn::Embedding(96, 8));
    convolution = register_module("convolution", torch::nn::Conv1d(torch::nn::Conv1dOptions(8, 8, 3).padding(1)));
    places = register_module("places", torch::nn::Embedding(24, 8));
    head = register_module("head", torch::nn::Linear(8, 96));
  }
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& labels) {
    const int64_t time = tokens.size(1);
    at::Tensor x = embedding(tokens) + places(torch::arange(time)) + places->weight.slice(0, 0, time);
    x = x + convolution(x.transpose(1, 2)).transpose(1, 2);
    x = x + x.cumsum(1) * 0.1 + x.softmax(1) + x.mean(1, true) + std::get<0>(x.max(1, true));
    x = x - x.flip({1}) * 0.5 + x.roll(1, 1);
    const at::Tensor scores =
        torch::matmul(x, x.transpose(1, 2))
            .masked_fill(torch::ones({time, time}, torch::kBool).triu(1), -std::numeric_limits<double>::infinity());
    x = x + torch::matmul(scores.softmax(-1), x);
    // The next token's label, shifted within the model.
    const at::Tensor logits = head(x).slice(1, 0, -1);
    return torch::nn::functional::cross_entropy(logits.flatten(0, 1), labels.slice(1, 1).flatten());
  }
  torch::nn::Embedding embedding{nullptr}, places{nullptr};
  torch::nn::Conv1d convolution{nullptr};
  torch::nn::Linear head{nullptr};
};

TEST(SequenceModels, OperatorsOverPositionsSeeTheWholeSequence) {
  const auto make = [] {
    auto model = std::make_shared<Positions>();
    model->to(torch::kDouble);
    return model;
  };
  const auto loss_of = [](Positions& model, const SequenceBatch& batch) {
    return model.forward(batch.tokens, batch.labels);
  };
  for (const SequenceOrder order : kOrders) {
    expect_model_of_one_process<Positions>(make, loss_of, batch_of(24), 2, {.order = order},
                                           /*joins=*/true);
  }
}

// Half precision, where autocast decides what attention gets.
TEST(SequenceModels, AttentionUnderAutocast) {
  test::run_ranks(2, [](comm::Communicator& group) {
    for (const SequenceMethod method : {SequenceMethod::kUlysses, SequenceMethod::kRing}) {
      const auto axis = make_sequence_axis(shared(group), {.attention = method, .order = SequenceOrder::kZigzag});
      const at::Tensor x = numbers(0, {2, 4, 16, 8}).to(torch::kFloat);
      at::autocast::set_autocast_enabled(at::kCPU, true);
      at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
      const at::Tensor cut = cut_sequence(x, axis, 2);
      const at::Tensor out = at::scaled_dot_product_attention(cut, cut, cut, {}, 0.0, /*is_causal=*/true);
      const at::Tensor expected = at::scaled_dot_product_attention(x, x, x, {}, 0.0, /*is_causal=*/true);
      at::autocast::set_autocast_enabled(at::kCPU, false);
      EXPECT_EQ(out.scalar_type(), at::kBFloat16);
      EXPECT_LT(relative_error(whole(out), expected), 1e-2);
    }
  });
}

TEST(SequenceModels, OneRankHasThePlainModule) {
  test::run_ranks(1, [](comm::Communicator& group) {
    const auto axis = make_sequence_axis(shared(group));
    const at::Tensor tokens = torch::arange(6).view({1, 6});
    EXPECT_TRUE(cut_sequence(tokens, axis).is_same(tokens));
    const auto model = new_model_of_sequences(small_gpt());
    const SplitModule split = parallelize_sequence(*model, axis);
    model->forward(tokens, tokens).backward();
    split.reduce_summed_gradients();
    EXPECT_TRUE(model->parameters()[0].grad().defined());
  });
}

TEST(SequenceModels, RefusesWhatCannotBe) {
  test::run_ranks(2, [](comm::Communicator& group) {
    const auto says = [](const char* text) { return ThrowsMessage<UsageError>(HasSubstr(text)); };
    const auto ring = make_sequence_axis(shared(group), {.attention = SequenceMethod::kRing});
    const auto ulysses = make_sequence_axis(shared(group), {.attention = SequenceMethod::kUlysses});
    const at::Tensor x = torch::ones({1, 1, 4, 4});
    const auto attend = [&](const std::shared_ptr<Axis>& axis, double dropout) {
      const at::Tensor cut = cut_sequence(x, axis, 2);
      return at::scaled_dot_product_attention(cut, cut, cut, {}, dropout);
    };
    EXPECT_THAT([&] { attend(ring, 0.1); }, says("expected dropout_p 0 with sequence_parallel.attention"));
    EXPECT_THAT([&] { attend(ulysses, 0.0); }, says("found 1. Use ring"));
    EXPECT_THAT([&] { cut_sequence(x, ring, 1); }, says("a position or more for each of the 2 ranks"));
    EXPECT_THAT([&] { cut_sequence(x, ring, 4); }, says("a full tensor with dimension 4"));
    EXPECT_THAT([&] { cut_sequence(cut_sequence(x, ring, 2), ring, 2); }, says("a full tensor"));
    EXPECT_THAT([&] { cut_sequence(x, make_axis(shared(group)), 2); }, says("an axis of make_sequence_axis()"));
    // A program that reads memory sees no piece of it for the whole.
    EXPECT_ANY_THROW(cut_sequence(x, ring, 2).data_ptr());
  });
}

}  // namespace
}  // namespace ds::parallel
