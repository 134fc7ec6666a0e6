// Models with dropout over ranks that are processes, each with its own generator: the masks are those of one process,
// with sequence parallelism and with regions that are computed again.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

#include "comm/backends/factory.h"
#include "dsengine/activation_checkpoint.h"
#include "dsengine/sequence_attention.h"
#include "tests/parallel/split_ranks.h"
#include "tests/support/process_ranks.h"

namespace ds::parallel {
namespace {

using enum Style;

struct Block : torch::nn::Module {
  Block() {
    norm1 = register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({32})));
    norm2 = register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({32})));
    qkv = register_module("qkv", torch::nn::Linear(32, 96));
    out = register_module("out", torch::nn::Linear(32, 32));
    fc = register_module("fc", torch::nn::Linear(32, 64));
    proj = register_module("proj", torch::nn::Linear(64, 32));
  }
  at::Tensor forward(const at::Tensor& x) {
    std::vector<at::Tensor> heads;
    for (const at::Tensor& part : qkv(norm1(x)).chunk(3, -1)) {
      heads.push_back(part.view({x.size(0), x.size(1), 4, 8}).transpose(1, 2));
    }
    const at::Tensor mixed = at::scaled_dot_product_attention(heads[0], heads[1], heads[2], {}, 0.2, /*causal=*/true);
    const at::Tensor attended = x + at::dropout(out(mixed.transpose(1, 2).flatten(2)), 0.3, is_training());
    return attended + at::dropout(proj(at::dropout(at::gelu(fc(norm2(attended))), 0.1, is_training())), 0.3, true);
  }
  torch::nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  torch::nn::Linear qkv{nullptr}, out{nullptr}, fc{nullptr}, proj{nullptr};
};

struct Model : torch::nn::Module {
  explicit Model(bool with_regions) : regions(with_regions) {
    embedding = register_module("embedding", torch::nn::Embedding(48, 32));
    for (const char* name : {"first", "second"}) blocks.push_back(register_module(name, std::make_shared<Block>()));
    encoder = register_module("encoder",
                              torch::nn::TransformerEncoderLayer(
                                  torch::nn::TransformerEncoderLayerOptions(32, 4).dim_feedforward(64).dropout(0.2)));
  }
  at::Tensor forward(const at::Tensor& tokens) {
    at::Tensor x = at::dropout(embedding(tokens), 0.1, true);
    for (const auto& block : blocks) {
      const auto run = [block](const at::Tensor& input) { return block->forward(input); };
      x = regions ? recompute::checkpoint(run, x) : run(x);
    }
    x = encoder(x.transpose(0, 1)).transpose(0, 1);
    return at::cross_entropy_loss(at::linear(x, embedding->weight).flatten(0, 1), tokens.flatten());
  }
  bool regions;
  torch::nn::Embedding embedding{nullptr};
  std::vector<std::shared_ptr<Block>> blocks;
  torch::nn::TransformerEncoderLayer encoder{nullptr};
};

std::shared_ptr<Model> new_model(bool with_regions) {
  torch::manual_seed(3);
  auto model = std::make_shared<Model>(with_regions);
  model->to(at::kDouble);
  return model;
}

void expect_masks_of_one_process(const std::shared_ptr<comm::Communicator>& communicator, bool regions, bool cut) {
  const std::string what = std::string(regions ? "regions, " : "plain, ") + (cut ? "sequences cut" : "whole");
  const at::Tensor tokens = (at::arange(4 * 8) * 7 % 48).view({4, 8});
  const auto reference = new_model(regions);
  torch::manual_seed(9);
  const at::Tensor expected = reference->forward(tokens);
  expected.backward();
  const double next = at::rand({1}).item<double>();
  const auto model = new_model(regions);
  const SplitModule split =
      parallelize_module(*model, communicator,
                         {{.pattern = ".*qkv|.*in_proj_.*", .style = kColumn, .blocks = {32, 32, 32}},
                          {.pattern = ".*fc|.*linear1", .style = kColumn},
                          {.pattern = ".*out|.*proj|.*linear2|.*out_proj", .style = kRow},
                          {.pattern = "embedding", .style = kVocabulary}},
                         {.sequence_parallel = cut});
  torch::manual_seed(9);
  const at::Tensor loss = model->forward(tokens);
  EXPECT_LE(relative_error(loss, expected), 1e-12) << what;
  loss.backward();
  split.reduce_summed_gradients();
  EXPECT_EQ(at::rand({1}).item<double>(), next) << what << ": as many numbers were drawn";
  for (const auto& entry : model->named_parameters()) {
    at::Tensor truth = reference->named_parameters()[entry.key()].grad();
    const bool is_part = is_split(entry.value());
    if (is_part) truth = slice_of(truth, placement_of(entry.value()));
    EXPECT_LE(relative_error((is_part ? leaf_of(entry.value()) : entry.value()).grad(), truth), 1e-11)
        << what << ", " << entry.key();
  }
  EXPECT_TRUE(split.joined_operators().empty()) << what << ": " << split.joined_operators()[0].name;
}

// Positions that are cut over the ranks: heads are exchanged where there are enough, else keys are gathered.
void expect_masks_on_cut_positions(const std::shared_ptr<comm::Communicator>& communicator, SequenceOrder order) {
  const at::Tensor tokens = (at::arange(4 * 8) * 7 % 48).view({4, 8});
  const auto reference = new_model(/*with_regions=*/true);
  torch::manual_seed(9);
  const at::Tensor expected = reference->forward(tokens);
  expected.backward();
  const auto model = new_model(/*with_regions=*/true);
  const auto axis = make_sequence_axis(communicator, {.order = order});
  const SplitModule split = parallelize_sequence(*model, axis);
  torch::manual_seed(9);
  const at::Tensor loss = model->forward(cut_sequence(tokens, axis));
  EXPECT_LE(relative_error(loss, expected), 1e-12);
  loss.backward();
  split.reduce_summed_gradients();
  const auto truth = reference->named_parameters();
  for (const auto& [name, leaf] : split.named_leaves) {
    EXPECT_LE(relative_error(leaf.grad(), truth[name].grad()), 1e-11) << name;
  }
}

void expect_masks_with_all_settings(const ds::testing::ProcessRank& ranks) {
  const std::shared_ptr<comm::Communicator> communicator = comm::make_communicator(ranks.meet(), at::kCPU);
  for (const bool regions : {false, true}) {
    for (const bool cut : {false, true}) expect_masks_of_one_process(communicator, regions, cut);
  }
  for (const SequenceOrder order : {SequenceOrder::kContiguous, SequenceOrder::kZigzag}) {
    expect_masks_on_cut_positions(communicator, order);
  }
}

DS_PROCESS_TEST(DropoutOverProcesses, DrawsTheMasksOfOneOverTwoRanks, .world_size = 2) {
  expect_masks_with_all_settings(ranks);
}

DS_PROCESS_TEST(DropoutOverProcesses, DrawsTheMasksOfOneOverFourRanks, .world_size = 4) {
  expect_masks_with_all_settings(ranks);
}

}  // namespace
}  // namespace ds::parallel
