// Bytes that a rank sends, against Megatron-LM's formulas.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "examples/gpt/gpt_init.h"
#include "examples/gpt/gpt_model.h"
#include "tests/parallel/llama.h"
#include "tests/parallel/split_ranks.h"

namespace ds::parallel {
namespace {

using enum Style;

constexpr int64_t kBatch = 2;
constexpr int64_t kTime = 16;

struct Traffic {
  int64_t bytes;
  int64_t calls;
};

Traffic of(const comm::Communicator& communicator) {
  Traffic result{.bytes = communicator.counters().total_bytes_sent(), .calls = 0};
  for (const int64_t calls : communicator.counters().calls) result.calls += calls;
  return result;
}

// Counted after the split.
template <class Module>
void expect_traffic(const std::shared_ptr<Module>& module, comm::Communicator& communicator,
                    const std::vector<SplitRule>& rules, int64_t layers, int64_t hidden) {
  const at::Tensor tokens = at::arange(kBatch * kTime).view({kBatch, kTime}) * 5 % 64;
  parallelize_module(*module, shared(communicator), rules);
  communicator.reset_counters();
  const at::Tensor loss = module->forward(tokens, tokens);
  const int64_t ranks = communicator.size();
  const auto reduced = [&](int64_t elements) { return 2 * elements * 4 * (ranks - 1) / ranks; };
  // Each layer adds up attention and MLP, the embedding adds up once; the loss exchanges the greatest score, the sum
  // and the target's score of each row.
  const int64_t hidden_bytes = reduced(kBatch * kTime * hidden);
  const int64_t row_bytes = reduced(kBatch * kTime);
  const Traffic forward = of(communicator);
  EXPECT_EQ(forward.bytes, (2 * layers + 1) * hidden_bytes + 3 * row_bytes);
  EXPECT_EQ(forward.calls, 2 * layers + 3);
  // Backward: the gradient of each column layer's input, and of the scores'.
  communicator.reset_counters();
  loss.backward();
  const Traffic backward = of(communicator);
  EXPECT_EQ(backward.bytes, (2 * layers + 1) * hidden_bytes);
  EXPECT_EQ(backward.calls, 2 * layers + 1);
}

// With sequence parallelism a reduce-scatter and an all-gather take the place of each all-reduce: as many bytes,
// forward and backward. The gradients of whole parameters are added up at the end, in one all-reduce.
void expect_traffic_of_cut_sequences(gpt::Gpt& module, comm::Communicator& communicator,
                                     const std::vector<SplitRule>& rules, int64_t layers, int64_t hidden) {
  const at::Tensor tokens = at::arange(kBatch * kTime).view({kBatch, kTime}) * 5 % 64;
  const SplitModule split = parallelize_module(module, shared(communicator), rules, {.sequence_parallel = true});
  communicator.reset_counters();
  const at::Tensor loss = module.forward(tokens, tokens);
  const int64_t ranks = communicator.size();
  const int64_t half = kBatch * kTime * hidden * 4 * (ranks - 1) / ranks;  // of an all-reduce
  const int64_t row_bytes = 2 * kBatch * kTime * 4 * (ranks - 1) / ranks;
  // Two pairs a layer; the embedding scatters, the vocabulary gathers.
  const Traffic forward = of(communicator);
  EXPECT_EQ(forward.bytes, layers * 4 * half + 2 * half + 3 * row_bytes);
  EXPECT_EQ(forward.calls, 4 * layers + 2 + 2);
  communicator.reset_counters();
  loss.backward();
  const Traffic backward = of(communicator);
  EXPECT_EQ(backward.bytes, layers * 4 * half + 2 * half);
  EXPECT_EQ(backward.calls, 4 * layers + 2);
  communicator.reset_counters();
  split.reduce_summed_gradients();
  int64_t summed = 0;
  for (const auto& [name, leaf] : split.summed_leaves()) summed += leaf.numel() + 1;
  EXPECT_EQ(of(communicator).bytes, 2 * summed * 4 * (ranks - 1) / ranks);
  EXPECT_EQ(of(communicator).calls, 1);
}

TEST(Traffic, OfAGptWithSequenceParallelismIsAsMuch) {
  for (const int ranks : {2, 4}) {
    test::run_ranks(ranks, [](comm::Communicator& communicator) {
      gpt::Gpt model({.layers = 2, .hidden = 32, .heads = 4, .seq_len = kTime, .vocab = 64});
      gpt::initialize_weights(model, 3);
      expect_traffic_of_cut_sequences(model, communicator,
                                      {{.pattern = ".*qkv", .style = kColumn, .blocks = {32, 32, 32}},
                                       {.pattern = ".*attn.proj", .style = kRow},
                                       {.pattern = ".*fc", .style = kColumn},
                                       {.pattern = ".*mlp.proj", .style = kRow},
                                       {.pattern = "wte|head", .style = kVocabulary}},
                                      2, 32);
    });
  }
}

TEST(Traffic, OfAGptIsMegatrons) {
  for (const int ranks : {2, 4}) {
    test::run_ranks(ranks, [](comm::Communicator& communicator) {
      const auto model = std::make_shared<gpt::Gpt>(
          gpt::GptConfig{.layers = 2, .hidden = 32, .heads = 4, .seq_len = kTime, .vocab = 64});
      gpt::initialize_weights(*model, 3);
      expect_traffic(model, communicator,
                     {{.pattern = ".*qkv", .style = kColumn, .blocks = {32, 32, 32}},
                      {.pattern = ".*attn.proj", .style = kRow},
                      {.pattern = ".*fc", .style = kColumn},
                      {.pattern = ".*mlp.proj", .style = kRow},
                      {.pattern = "wte|head", .style = kVocabulary}},
                     2, 32);
    });
  }
}

// Query, key and value share one gradient exchange, and so do gate and up. q_norm is one weight for the heads of all
// ranks: its gradient is added up too.
TEST(Traffic, OfALlamaSharesWhatLayersReadTogether) {
  test::run_ranks(2, [](comm::Communicator& communicator) {
    const LlamaSizes sizes{.hidden = 32, .heads = 4, .groups = 2, .inner = 48, .vocabulary = 64, .layers = 2};
    const auto model = std::make_shared<Llama>(sizes);
    const at::Tensor tokens = at::arange(kBatch * kTime).view({kBatch, kTime}) * 5 % 64;
    parallelize_module(*model, shared(communicator),
                       {{.pattern = ".*[qkv]_proj", .style = kColumn},
                        {.pattern = ".*o_proj", .style = kRow},
                        {.pattern = ".*(gate|up)_proj", .style = kColumn},
                        {.pattern = ".*down_proj", .style = kRow},
                        {.pattern = "embed_tokens|lm_head", .style = kVocabulary}});
    const at::Tensor loss = model->forward(tokens, tokens);
    communicator.reset_counters();
    loss.backward();
    const Traffic backward = of(communicator);
    const int64_t hidden_bytes = 2 * kBatch * kTime * sizes.hidden * 4 / 2;
    const int64_t q_norm_bytes = 2 * (sizes.hidden / sizes.heads) * 4 / 2;
    EXPECT_EQ(backward.bytes, (2 * sizes.layers + 1) * hidden_bytes + sizes.layers * q_norm_bytes);
    EXPECT_EQ(backward.calls, 3 * sizes.layers + 1);
  });
}

TEST(Traffic, OfConversions) {
  test::run_ranks(4, [](comm::Communicator& communicator) {
    const std::shared_ptr<Axis> axis = make_axis(shared(communicator));
    const at::Tensor x = at::arange(96, at::kFloat).view({8, 12});
    const int64_t bytes = 8 * 12 * 4;
    communicator.reset_counters();
    const at::Tensor rows = distribute(x, axis, 0);
    EXPECT_EQ(of(communicator).bytes, 0);
    const at::Tensor columns = redistribute(rows, -1);
    EXPECT_EQ(of(communicator).bytes, bytes / 4 * 3 / 4);
    EXPECT_EQ(relative_error(local_part(columns), x.narrow(1, 3 * communicator.rank(), 3)), 0);
    communicator.reset_counters();
    EXPECT_EQ(relative_error(whole(columns), x), 0);
    EXPECT_EQ(of(communicator).bytes, bytes * 3 / 4);
  });
}

}  // namespace
}  // namespace ds::parallel
