// The arithmetic under ds-tool simulate: layers, stages, links, data-parallel groups. Numbers are worked out by hand.
#include "tools/model_cost.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "core/check.h"
#include "tools/collective_cost.h"
#include "tools/machine.h"

namespace ds::tool {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(ModelCost, OfAGpt) {
  const GptShape shape{.layers = 2, .hidden = 8, .heads = 2, .seq_len = 16, .vocab = 32};
  const std::vector<LayerCost> layers = gpt_layers(shape, /*micro_batch=*/3, /*element_bytes=*/2);
  ASSERT_EQ(layers.size(), 6U);
  EXPECT_EQ(layers[0].name, "wte");
  EXPECT_EQ(layers[0].parameters, 32 * 8);
  EXPECT_EQ(layers[0].forward_flops, 0);
  EXPECT_EQ(layers[1].parameters, 16 * 8);
  const LayerCost& block = layers[3];
  EXPECT_EQ(block.name, "h.1");
  EXPECT_EQ(block.parameters, 12 * 64 + 13 * 8);
  EXPECT_EQ(block.forward_flops, 2.0 * (12 * 64 + 13 * 8) * 48 + 4.0 * 16 * 8 * 48);
  EXPECT_EQ(block.kept_bytes, 34.0 * 16 * 3 * 8 + 5.0 * 2 * 16 * 16 * 3);
  EXPECT_EQ(block.output_bytes, 2.0 * 48 * 8);
  EXPECT_EQ(layers[4].parameters, 2 * 8);
  EXPECT_EQ(layers[5].name, "head");
  EXPECT_EQ(layers[5].parameters, 32 * 8);
  EXPECT_EQ(layers[5].forward_flops, 2.0 * 32 * 8 * 48);
  EXPECT_EQ(layers[5].kept_bytes, 2.0 * 48 * 8 + 4.0 * 48 * 32);
  EXPECT_EQ(count_parameters(layers), 32 * 8 + 16 * 8 + 2 * (12 * 64 + 13 * 8) + 16 + 32 * 8);
}

TEST(ModelCost, OfAGptWithTiedHeadFlashAttentionAndFloat32) {
  const GptShape shape{
      .layers = 1, .hidden = 8, .heads = 2, .seq_len = 16, .vocab = 32, .tied = true, .flash_attention = true};
  const std::vector<LayerCost> layers = gpt_layers(shape, 1, 4);
  EXPECT_EQ(layers[2].kept_bytes, (16.0 * 4 + 2) * 16 * 8);
  EXPECT_EQ(layers[0].tied, layers[4].tied);
  EXPECT_EQ(layers[4].parameters, 32 * 8);
  EXPECT_EQ(count_parameters(layers), 32 * 8 + 16 * 8 + (12 * 64 + 13 * 8) + 16);
}

TEST(ModelCost, OfSums) {
  const std::vector<LayerCost> layers =
      equal_layers({.layers = 3, .parameters = 11, .flops = 6, .activation_bytes = 9, .output_bytes = 5});
  ASSERT_EQ(layers.size(), 3U);
  EXPECT_EQ(layers[0].parameters, 4);
  EXPECT_EQ(layers[2].parameters, 3);
  EXPECT_EQ(layers[2].forward_flops, 2);
  EXPECT_EQ(layers[2].kept_bytes, 3);
  EXPECT_EQ(layers[2].output_bytes, 5);
}

TEST(StageLayout, PartitionsAndRegions) {
  std::vector<LayerCost> layers(4);
  for (size_t i = 0; i < 4; ++i) {
    layers[i] = {.name = "",
                 .type = i == 0 ? "Embedding" : "Block",
                 .parameters = i == 0 ? 90 : 10,
                 .forward_flops = i == 3 ? 7.0 : 1.0,
                 .kept_bytes = 100.0 + static_cast<double>(i),
                 .output_bytes = 8,
                 .tied = ""};
  }
  const pipeline::Schedule schedule = pipeline::make_schedule(pipeline::ScheduleKind::k1F1B, {.ranks = 2});
  const auto cut = [&](const char* partition, int64_t interval = 0) {
    return cut_into_stages(layers, schedule, partition, interval);
  };
  EXPECT_EQ(cut("best")[0].end, 1);
  EXPECT_EQ(cut("uniform")[0].end, 2);
  EXPECT_EQ(cut("type:block")[0].end, 2);
  EXPECT_EQ(cut("profile")[0].end, 3);
  EXPECT_THAT([&] { cut("evenly"); }, ThrowsMessage<ConfigError>(HasSubstr("found \"evenly\"")));
  const StageLayout last = cut("best").back();
  EXPECT_EQ(last.parameters, 30);
  EXPECT_EQ(last.forward_flops, 9);
  EXPECT_EQ(last.kept_bytes, 306);
  EXPECT_EQ(last.recomputed_bytes, 0);
  EXPECT_EQ(cut("best", 2).back().kept_bytes, 16);  // the inputs of two regions, of two layers and of one
  EXPECT_EQ(cut("best", 2).back().recomputed_bytes, 203);
  EXPECT_EQ(cut("best", 2).front().kept_bytes, 0);  // nothing comes before the first layer
}

TEST(Machine, RanksOfANodeShareItsLink) {
  const Machine machine{.ranks = 8, .ranks_per_node = 4, .node_rate = 1000, .link_rate = 100};
  Traffic apart(machine);
  for (int64_t rank = 0; rank < 4; ++rank) apart.add(rank, rank + 4, 7);
  EXPECT_EQ(apart.rate(0, 4), 25);
  EXPECT_THAT(apart.bytes(), ElementsAre(28, 0));
  Traffic ring(machine);
  const Ring all{.first = 0, .members = 8};
  ring.add(all, 5);
  EXPECT_EQ(ring.rate(all), 100);  // one rank of each node talks to the other
  EXPECT_THAT(ring.bytes(), ElementsAre(5, 5));
  Traffic near(machine);
  const Ring node{.first = 4, .members = 4};
  near.add(node, 5);
  EXPECT_EQ(near.rate(node), 1000);
  EXPECT_THAT(near.bytes(), ElementsAre(0, 0));
  Traffic across(machine);
  for (int64_t first = 0; first < 4; ++first) across.add(Ring{.first = first, .members = 2, .stride = 4});
  EXPECT_EQ(across.rate(Ring{.first = 3, .members = 2, .stride = 4}), 25);
}

TEST(DataParallelCost, PartsAddUpToWhatIsPredicted) {
  for (const int stage : {0, 1, 2, 3}) {
    for (const int64_t accumulation : {1, 3}) {
      for (const auto& [copies, node] : {std::pair<int64_t, int64_t>{1, 1}, {2, 1}, {1, 4}}) {
        zero::MemoryQuestion question{.stage = stage,
                                      .dp = 8,
                                      .copies = stage == 0 ? 1 : copies,
                                      .node_ranks = stage == 3 ? node : 1,
                                      .parameters = 3'000'000,
                                      .parameter_bytes = 2,
                                      .gradient_bytes = 2,
                                      .communication_bytes = 2,
                                      .accumulation_steps = accumulation};
        const DataParallelBytes bytes = split_sent_bytes(question);
        EXPECT_EQ(bytes.total(), zero::predict_sent_bytes(question)) << stage << ' ' << accumulation << ' ' << node;
        EXPECT_EQ(bytes.in_passes, stage >= 2);
        EXPECT_EQ(bytes.gather > 0, stage > 0);
        EXPECT_EQ(bytes.gather_again > 0, stage == 3);
        EXPECT_EQ(bytes.join > 0, question.copies > 1);
        EXPECT_EQ(bytes.gather_again<bytes.gather, question.node_ranks> 1 || stage == 1 || stage == 2);
      }
    }
  }
}

TEST(DataParallelCost, WhatComputingHides) {
  EXPECT_DOUBLE_EQ(exposed_seconds(8, 0, 4), 8);
  EXPECT_DOUBLE_EQ(exposed_seconds(8, 100, 4), 2);  // the last bucket
  EXPECT_DOUBLE_EQ(exposed_seconds(8, 4, 4), 5);    // it begins after a quarter of 4
  EXPECT_DOUBLE_EQ(exposed_seconds(8, 4, 1), 8);
  EXPECT_DOUBLE_EQ(exposed_seconds(0, 4, 4), 0);
}

}  // namespace
}  // namespace ds::tool
