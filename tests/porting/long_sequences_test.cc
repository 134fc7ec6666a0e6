// The programs of docs/long_sequences.md, beside their plain loops.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>

#include "dsengine/sequence_attention.h"
#include "tests/core/page.h"
#include "tests/porting/ported_run.h"

namespace ds::engine::long_sequences {
namespace {

using torch::nn::functional::cross_entropy;
using torch::nn::functional::CrossEntropyFuncOptions;

constexpr int64_t kWords = 13;
constexpr int64_t kLength = 16;
constexpr int64_t kChannels = 8;
constexpr int64_t kHeads = 4;
constexpr int kSteps = 3;

// Scores, weights and sums of one attention: [batch, heads, positions, channels] to the same.
using Attention = std::function<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&)>;

// A decoder of one layer, which knows nothing of ranks.
struct DecoderImpl : torch::nn::Module {
  DecoderImpl() {
    words = register_module("words", torch::nn::Embedding(kWords, kChannels));
    places = register_module("places", torch::nn::Embedding(kLength, kChannels));
    qkv = register_module("qkv", torch::nn::Linear(torch::nn::LinearOptions(kChannels, 3 * kChannels).bias(false)));
    head = register_module("head", torch::nn::Linear(kChannels, kWords));
    fill(*this);
  }
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& positions, const Attention& attention) {
    const at::Tensor x = words(tokens) + places(positions);
    std::vector<at::Tensor> heads;
    for (const at::Tensor& part : qkv(x).chunk(3, -1)) {
      heads.push_back(part.unflatten(-1, {kHeads, kChannels / kHeads}).transpose(1, 2));
    }
    return head(x + attention(heads[0], heads[1], heads[2]).transpose(1, 2).flatten(-2));
  }
  torch::nn::Embedding words{nullptr}, places{nullptr};
  torch::nn::Linear qkv{nullptr}, head{nullptr};
};
TORCH_MODULE(Decoder);

// [2, kLength] tokens; the first row ends in padding, another number of it in each batch.
at::Tensor batch_of(int step, int group) {
  const at::Tensor tokens = torch::arange(2 * kLength).mul(7).add(5 * step + 3 * group).remainder(kWords);
  at::Tensor batch = tokens.view({2, kLength}).clone();
  batch.select(0, 0).narrow(0, kLength - 3 - 2 * group, 3 + 2 * group).fill_(-100);
  return batch;
}

State trained_plainly(int groups, const at::Tensor& documents) {
  Decoder model;
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(0.02).weight_decay(0.1));
  at::Tensor mask = torch::ones({kLength, kLength}, torch::kBool).tril();
  if (documents.defined()) mask = mask & documents.unsqueeze(1).eq(documents.unsqueeze(0));
  const auto attention = [&](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
    return at::scaled_dot_product_attention(q, k, v, mask);
  };
  for (int step = 0; step < kSteps; ++step) {
    at::Tensor sum = torch::zeros({});
    int64_t count = 0;
    for (int group = 0; group < groups; ++group) {
      const at::Tensor batch = batch_of(step, group);
      const at::Tensor logits = model->forward(batch.clamp_min(0), torch::arange(kLength), attention);
      const at::Tensor labels = batch.slice(1, 1).flatten();
      sum = sum + cross_entropy(logits.slice(1, 0, kLength - 1).flatten(0, 1), labels,
                                CrossEntropyFuncOptions().ignore_index(-100).reduction(torch::kSum));
      count += labels.ne(-100).sum().item<int64_t>();
    }
    optimizer.zero_grad();
    (sum / static_cast<double>(count)).backward();
    optimizer.step();
  }
  return parameters_of(*model);
}

class LongSequences : public ::testing::TestWithParam<int> {};

// Four ranks: two batches, each cut over two ranks.
TEST_P(LongSequences, RanksOfASequenceBesideRanksOfData) {
  const State expected = trained_plainly(2, {});
  test::run_ranks(4, [&](comm::Communicator& communicator) {
    Decoder model;
    const auto engine = start(model.ptr(), small_config(GetParam(), 1), communicator).engine;
    comm::Communicator& world = engine->communicator();
    std::shared_ptr<ds::comm::Communicator> sequence;  // the ranks that share a batch
    for (int first = 0; first < world.size(); first += 2) {
      const auto made = world.new_group({first, first + 1}, "sequence");  // on all ranks
      if (made) sequence = made;
    }
    const ds::parallel::SequenceLayout layout{.order = ds::parallel::SequenceOrder::kZigzag};
    const auto attention = [&](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
      return ds::parallel::ring_attention(q, k, v, *sequence, {.causal = true, .layout = layout});
    };
    for (int step = 0; step < kSteps; ++step) {
      const at::Tensor batch = batch_of(step, world.rank() / 2);  // whole sequences; -100: padding
      const auto own = [&](const at::Tensor& whole) {
        return ds::parallel::shard_sequence(whole, *sequence, 1, layout);
      };
      const at::Tensor labels = own(torch::constant_pad_nd(batch.slice(1, 1), {0, 1}, -100));  // shifted, then cut
      const at::Tensor positions = ds::parallel::sequence_positions(batch.size(1), *sequence, layout);
      const at::Tensor logits = model->forward(own(batch).clamp_min(0), positions, attention);
      const at::Tensor sum = cross_entropy(logits.flatten(0, 1), labels.flatten(),
                                           CrossEntropyFuncOptions().ignore_index(-100).reduction(torch::kSum));
      engine->backward_mean(sum, labels.ne(-100).sum().item<double>());
      engine->step();
    }
    EXPECT_LT(largest_difference(copy_of(engine->fp32_state_dict()), expected), 1e-5);
  });
}

// All ranks share a batch, of several documents.
TEST_P(LongSequences, PackedDocumentsOverAllRanks) {
  const at::Tensor documents = torch::tensor({0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 2, 2, 3, 3});
  const State expected = trained_plainly(1, documents);
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    Decoder model;
    const auto engine = start(model.ptr(), small_config(GetParam(), 1), communicator).engine;
    comm::Communicator& sequence = engine->communicator();
    const auto attention = [&](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
      return ds::parallel::ulysses_attention(q, k, v, sequence, {.causal = true, .documents = documents});
    };
    for (int step = 0; step < kSteps; ++step) {
      const at::Tensor batch = batch_of(step, 0);
      const auto own = [&](const at::Tensor& whole) { return ds::parallel::shard_sequence(whole, sequence); };
      const at::Tensor labels = own(torch::constant_pad_nd(batch.slice(1, 1), {0, 1}, -100));
      const at::Tensor positions = ds::parallel::sequence_positions(batch.size(1), sequence);
      const at::Tensor logits = model->forward(own(batch).clamp_min(0), positions, attention);
      const at::Tensor sum = cross_entropy(logits.flatten(0, 1), labels.flatten(),
                                           CrossEntropyFuncOptions().ignore_index(-100).reduction(torch::kSum));
      engine->backward_mean(sum, labels.ne(-100).sum().item<double>());
      engine->step();
    }
    EXPECT_LT(largest_difference(copy_of(engine->fp32_state_dict()), expected), 1e-5);
  });
}

INSTANTIATE_TEST_SUITE_P(Stages, LongSequences, ::testing::Values(0, 1, 2, 3), stage_name);

// The same decoder as a module that makes positions and attention by itself, and returns its loss.
struct LanguageModelImpl : torch::nn::Module {
  LanguageModelImpl() { decoder = register_module("decoder", Decoder()); }
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& labels) {
    const auto attention = [](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
      return at::scaled_dot_product_attention(q, k, v, {}, 0.0, /*is_causal=*/true);
    };
    const at::Tensor logits = decoder->forward(tokens, torch::arange(tokens.size(1)), attention);
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), CrossEntropyFuncOptions().ignore_index(-100));
  }
  Decoder decoder{nullptr};
};
TORCH_MODULE(LanguageModel);

TEST(LongSequencesModule, TrainsUnchangedOnBatchesThatAreCut) {
  const at::Tensor batch = batch_of(0, 0);
  const at::Tensor tokens = batch.clamp_min(0);
  const at::Tensor labels = torch::constant_pad_nd(batch.slice(1, 1), {0, 1}, -100);
  LanguageModel plain;
  torch::optim::AdamW by_one(plain->parameters(), 1e-3);
  plain->forward(tokens, labels).backward();
  by_one.step();
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    const std::shared_ptr<comm::Communicator> sequence(std::shared_ptr<void>(), &communicator);
    LanguageModel model;
    const auto axis = ds::parallel::make_sequence_axis(sequence, {.order = ds::parallel::SequenceOrder::kZigzag});
    const auto split = ds::parallel::parallelize_sequence(*model, axis);
    torch::optim::AdamW optimizer(split.leaves(), 1e-3);
    const at::Tensor loss =
        model->forward(ds::parallel::cut_sequence(tokens, axis), ds::parallel::cut_sequence(labels, axis));
    loss.backward();                  // the mean over the valid tokens of all ranks, the same on each
    split.reduce_summed_gradients();  // each rank has a part of every gradient
    optimizer.step();
    for (const auto& [name, leaf] : split.named_leaves) {
      const at::Tensor difference = leaf - plain->named_parameters()[name];
      EXPECT_LT(difference.abs().max().item<double>(), 1e-5) << name;
    }
  });
}

TEST(LongSequencesPage, EveryProgramOfThePageStandsInThisFile) {
  const ProgramsOfPage found = programs_of_page("docs/long_sequences.md", "tests/porting/long_sequences_test.cc");
  EXPECT_THAT(found.missing, ::testing::IsEmpty());
  EXPECT_GE(found.count, 3);
}

}  // namespace
}  // namespace ds::engine::long_sequences
