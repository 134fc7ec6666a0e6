// The programs of docs/long_sequences.md, beside their plain loops.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>

#include "dsengine/sequence_attention.h"
#include "dsengine/sequence_parallel.h"
#include "tests/core/page.h"
#include "tests/porting/ported_run.h"
#include "tests/support/scratch_folder.h"

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

struct Cell {
  int ranks = 2;
  int sequence = 2;  // ranks that share a batch
  int stage = 0;
  std::string attention = "auto", order = "contiguous";
  nlohmann::ordered_json zero = nlohmann::ordered_json::object();  // more keys of zero_optimization
};

std::string name_of(const Cell& cell) {
  return cat(cell.ranks, "_ranks_sequence_", cell.sequence, "_stage_", cell.stage, "_", cell.attention, "_", cell.order,
             cell.zero.empty() ? "" : "_" + cell.zero.begin().key());
}

nlohmann::ordered_json config_of(const Cell& cell) {
  nlohmann::ordered_json config = small_config(cell.stage, 1);
  config["zero_optimization"].update(cell.zero);
  if (cell.sequence == 1) return config;
  config["sequence_parallel_size"] = cell.sequence;
  config["sequence_parallel"] = {{"attention", cell.attention}, {"order", cell.order}};
  return config;
}

std::shared_ptr<Engine> start_cut(const Decoder& model, const nlohmann::ordered_json& config,
                                  comm::Communicator& communicator) {
  const InitializeOptions options{
      .model = model.ptr(), .config = config, .cuts_sequences = true, .communicator = borrowed(communicator)};
  return initialize(options).engine;
}

// The program of the page: a step on the batch of this rank's group.
void train_step(const std::shared_ptr<Engine>& engine, Decoder& model, int step) {
  const int group = engine->communicator().rank();
  engine::SequenceParallel sequence(engine);
  const auto attention = [&](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
    return sequence.attention(q, k, v, {.causal = true});
  };
  const at::Tensor batch = batch_of(step, group);  // whole sequences; -100: padding
  const at::Tensor tokens = sequence.shard(batch).clamp_min(0);
  const at::Tensor labels = sequence.shard_labels(batch);  // shifted, then cut
  const at::Tensor logits = model->forward(tokens, sequence.positions(batch.size(1)), attention);
  const at::Tensor sum = cross_entropy(logits.flatten(0, 1), labels.flatten(),
                                       CrossEntropyFuncOptions().ignore_index(-100).reduction(torch::kSum));
  engine->backward_mean(sum, labels.ne(-100).sum().item<double>());
  engine->step();
}

class SequencesOfTheConfig : public ::testing::TestWithParam<Cell> {};

// The same program for every size: only the config changes.
TEST_P(SequencesOfTheConfig, TrainAsOneProcess) {
  const Cell& cell = GetParam();
  const State expected = trained_plainly(cell.ranks / cell.sequence, {});
  test::run_ranks(cell.ranks, [&](comm::Communicator& communicator) {
    Decoder model;
    const auto engine = start_cut(model, config_of(cell), communicator);
    EXPECT_EQ(engine->dp_world_size(), cell.ranks / cell.sequence);
    EXPECT_EQ(engine->train_batch_size(), 4 * cell.ranks / cell.sequence);
    for (int step = 0; step < kSteps; ++step) train_step(engine, model, step);
    EXPECT_EQ(engine->global_samples(), kSteps * engine->train_batch_size());
    EXPECT_LT(largest_difference(copy_of(engine->fp32_state_dict()), expected), 1e-5);
  });
}

INSTANTIATE_TEST_SUITE_P(
    Cells, SequencesOfTheConfig,
    ::testing::Values(Cell{.ranks = 2, .sequence = 1, .stage = 2}, Cell{.stage = 0},
                      Cell{.stage = 1, .attention = "ring"},
                      Cell{.ranks = 4, .stage = 2, .attention = "ring", .order = "zigzag"},
                      Cell{.ranks = 4, .sequence = 4, .stage = 3},
                      Cell{.ranks = 4, .stage = 3, .order = "zigzag", .zero = {{"mics_shard_size", 2}}}),
    [](const auto& info) { return name_of(info.param); });

// What a rank gives to backward() is its addend: gradients are added over a sequence and averaged over batches.
TEST(LongSequences, LossesAreAddendsOfThatOfTheBatch) {
  const auto loss_of = [](Decoder& model, const at::Tensor& tokens, const at::Tensor& labels,
                          const at::Tensor& positions, const Attention& attention, int64_t count) {
    const at::Tensor logits = model->forward(tokens, positions, attention);
    return cross_entropy(logits.flatten(0, 1), labels.flatten(),
                         CrossEntropyFuncOptions().ignore_index(-100).reduction(torch::kSum)) /
           static_cast<double>(count);
  };
  const auto valid = [](int group) { return batch_of(0, group).slice(1, 1).ne(-100).sum().item<int64_t>(); };
  Decoder plain;
  at::Tensor loss = torch::zeros({});
  for (int group = 0; group < 2; ++group) {
    const at::Tensor batch = batch_of(0, group);
    const auto attention = [](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
      return at::scaled_dot_product_attention(q, k, v, {}, 0.0, /*is_causal=*/true);
    };
    const at::Tensor labels = torch::constant_pad_nd(batch.slice(1, 1), {0, 1}, -100);
    loss = loss + loss_of(plain, batch.clamp_min(0), labels, torch::arange(kLength), attention, valid(group)) / 2;
  }
  loss.backward();
  double squares = 0;
  for (const at::Tensor& parameter : plain->parameters()) squares += parameter.grad().square().sum().item<double>();
  test::run_ranks(4, [&](comm::Communicator& communicator) {
    Decoder model;
    nlohmann::ordered_json config = config_of({.stage = 2});
    config["gradient_clipping"] = 1e9;
    const auto engine = start_cut(model, config, communicator);
    const engine::SequenceParallel sequence(engine);
    const int group = engine->communicator().rank();
    const at::Tensor batch = batch_of(0, group);
    const auto attention = [&](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
      return sequence.attention(q, k, v);
    };
    engine->backward(loss_of(model, sequence.shard(batch).clamp_min(0), sequence.shard_labels(batch),
                             sequence.positions(kLength), attention, valid(group)));
    engine->step();
    EXPECT_NEAR(engine->get_global_grad_norm().value(), std::sqrt(squares), 2e-5);
  });
}

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

std::pair<at::Tensor, at::Tensor> tokens_and_labels(int step, int group) {
  const at::Tensor batch = batch_of(step, group);
  return {batch.clamp_min(0), torch::constant_pad_nd(batch.slice(1, 1), {0, 1}, -100)};
}

class UnmodifiedModels : public ::testing::TestWithParam<Cell> {};

// engine->forward() cuts whole batches; the loss is that of the whole batch on each of its ranks.
TEST_P(UnmodifiedModels, TrainAsOneProcess) {
  const Cell& cell = GetParam();
  const int groups = cell.ranks / cell.sequence;
  LanguageModel plain;
  torch::optim::AdamW optimizer(plain->parameters(), torch::optim::AdamWOptions(0.02).weight_decay(0.1));
  std::vector<std::vector<double>> losses(kSteps);
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    for (int group = 0; group < groups; ++group) {
      const auto [tokens, labels] = tokens_and_labels(step, group);
      const at::Tensor loss = plain->forward(tokens, labels);
      (loss / groups).backward();
      losses[static_cast<size_t>(step)].push_back(loss.item<double>());
    }
    optimizer.step();
  }
  const State expected = parameters_of(*plain);
  test::run_ranks(cell.ranks, [&](comm::Communicator& communicator) {
    LanguageModel model;
    const auto engine = start(model.ptr(), config_of(cell), communicator).engine;
    const int group = engine->communicator().rank();
    for (int step = 0; step < kSteps; ++step) {
      const auto [tokens, labels] = tokens_and_labels(step, group);
      const at::Tensor loss = engine->forward(model, tokens, labels);
      engine->backward(loss);
      engine->step();
      EXPECT_NEAR(loss.item<double>(), losses[static_cast<size_t>(step)][static_cast<size_t>(group)], 5e-6);
    }
    EXPECT_LT(largest_difference(copy_of(engine->fp32_state_dict()), expected), 1e-5);
  });
}

INSTANTIATE_TEST_SUITE_P(Cells, UnmodifiedModels,
                         ::testing::Values(Cell{.stage = 0}, Cell{.stage = 1, .attention = "ring"},
                                           Cell{.ranks = 4, .stage = 2, .attention = "ring", .order = "zigzag"},
                                           Cell{.ranks = 4, .sequence = 4, .stage = 3}),
                         [](const auto& info) { return name_of(info.param); });

// A checkpoint of one size goes on at another, and at a size of one.
TEST(LongSequences, CheckpointsLoadAtAnotherSize) {
  const State expected = trained_plainly(1, {});
  const test::ScratchFolder folder;
  const auto go_on = [&](const Cell& cell, int first, int last) {
    test::run_ranks(cell.ranks, [&](comm::Communicator& communicator) {
      Decoder model;
      const auto engine = start_cut(model, config_of(cell), communicator);
      if (first > 0) engine->load_checkpoint(folder.path().string());
      for (int step = first; step < last; ++step) train_step(engine, model, step);
      engine->save_checkpoint(folder.path().string());
      if (last < kSteps) return;
      EXPECT_LT(largest_difference(copy_of(engine->fp32_state_dict()), expected), 1e-5);
    });
  };
  go_on({.ranks = 4, .sequence = 4, .stage = 2}, 0, 1);
  go_on({.ranks = 2, .sequence = 2, .stage = 3, .attention = "ring"}, 1, 2);
  go_on({.ranks = 1, .sequence = 1, .stage = 0}, 2, kSteps);
}

TEST(LongSequences, RanksOfABatchWithOtherDocumentsAreNamed) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    Decoder model;
    const auto engine = start_cut(model, config_of({.stage = 1}), communicator);
    const engine::SequenceParallel sequence(engine);
    const at::Tensor batch = batch_of(engine->global_rank(), 0);  // read by the rank of the job
    const at::Tensor logits = model->forward(
        sequence.shard(batch).clamp_min(0), sequence.positions(kLength),
        [&](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) { return sequence.attention(q, k, v); });
    engine->backward(logits.square().mean());
    EXPECT_THAT([&] { engine->step(); },
                ::testing::ThrowsMessage<UsageError>(::testing::AllOf(
                    ::testing::HasSubstr("share a batch (sequence_parallel_size) have cut different ones"),
                    ::testing::ContainsRegex("rank 0: .*cut batches [0-9a-f]{4}; rank 1: .*cut batches [0-9a-f]{4}"))));
  });
}

TEST(LongSequences, WholeSequencesOnEachRankAreRefused) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    Decoder model;
    const auto loss = [&] { return model->head(torch::ones({1, kChannels})).mean(); };
    {
      const auto engine = start(model.ptr(), config_of({}), communicator).engine;
      EXPECT_THAT([&] { engine->backward(loss()); },
                  ::testing::ThrowsMessage<UsageError>(::testing::HasSubstr("engine->forward(model, inputs...)")));
    }
    Decoder other;
    const auto engine = start_cut(other, config_of({}), communicator);
    EXPECT_THAT(
        [&] {
          engine->backward(other->head(torch::ones({1, kChannels})).mean());
        },
        ::testing::ThrowsMessage<UsageError>(::testing::HasSubstr("SequenceParallel::shard()")));
  });
}

class PackedDocuments : public ::testing::TestWithParam<int> {};

// All ranks share a batch, of several documents.
TEST_P(PackedDocuments, OverAllRanks) {
  const at::Tensor documents = torch::tensor({0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 2, 2, 3, 3});
  const State expected = trained_plainly(1, documents);
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    Decoder model;
    const auto engine = start_cut(model, config_of({.stage = GetParam()}), communicator);
    const engine::SequenceParallel sequence(engine);
    const auto attention = [&](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
      return sequence.attention(q, k, v, {.causal = true, .documents = documents});
    };
    for (int step = 0; step < kSteps; ++step) {
      const at::Tensor batch = batch_of(step, 0);
      const at::Tensor labels = sequence.shard_labels(batch);
      const at::Tensor logits =
          model->forward(sequence.shard(batch).clamp_min(0), sequence.positions(batch.size(1)), attention);
      const at::Tensor sum = cross_entropy(logits.flatten(0, 1), labels.flatten(),
                                           CrossEntropyFuncOptions().ignore_index(-100).reduction(torch::kSum));
      engine->backward_mean(sum, labels.ne(-100).sum().item<double>());
      engine->step();
    }
    EXPECT_LT(largest_difference(copy_of(engine->fp32_state_dict()), expected), 1e-5);
  });
}

INSTANTIATE_TEST_SUITE_P(Stages, PackedDocuments, ::testing::Values(0, 3), stage_name);

TEST(LongSequencesPage, EveryProgramOfThePageStandsInThisFile) {
  const ProgramsOfPage found = programs_of_page("docs/long_sequences.md", "tests/porting/long_sequences_test.cc");
  EXPECT_THAT(found.missing, ::testing::IsEmpty());
  EXPECT_GE(found.count, 2);
}

}  // namespace
}  // namespace ds::engine::long_sequences
