// ds-tool simulate, and the arithmetic under it. Numbers are worked out by hand.
#include "tools/simulate_command.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "core/check.h"
#include "tests/support/scratch_folder.h"
#include "tests/tools/command_outcome.h"
#include "tools/data_parallel_cost.h"
#include "tools/machine.h"
#include "tools/model_cost.h"
#include "tools/stage_layout.h"

namespace ds::tool {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::ThrowsMessage;

constexpr double kRoundOff = 1e-9;

// Of a ds_config.
class Case {
 public:
  explicit Case(json config) : config_(std::move(config)) {
    config_["optimizer"] = {{"type", "AdamW"}};
    if (!config_.contains("train_micro_batch_size_per_gpu")) config_["train_micro_batch_size_per_gpu"] = 1;
  }
  // Stages, a schedule and micro-batches.
  static Case of(int stages, const std::string& schedule, int micro_batches, int zero_stage = 0) {
    return Case({{"pipeline", {{"stages", stages}, {"schedule", schedule}}},
                 {"gradient_accumulation_steps", micro_batches},
                 {"zero_optimization", {{"stage", zero_stage}}}});
  }
  json& config() { return config_; }

  Outcome run(SimulateOptions options) const {
    options.config = folder_.write("ds_config.json", config_.dump());
    return outcome_of([&](auto& out, auto& err) { return simulate(options, out, err); });
  }
  json report(SimulateOptions options, int expected = 0) const {
    options.json = true;
    options.per_rank = true;
    const Outcome outcome = run(options);
    EXPECT_EQ(outcome.code, expected) << outcome.err;
    return outcome.code == expected ? json::parse(outcome.out) : json();
  }

 private:
  test::ScratchFolder folder_;
  json config_;
};

// One operation takes a second on each of two equal layers; a byte takes a second.
SimulateOptions in_seconds(int64_t ranks) {
  SimulateOptions options;
  options.ranks = ranks;
  options.parameters = 2000;
  options.flops = 2e12;
  options.message_bytes = 0;
  options.tflops = 1;
  options.node_gbps = 8e-9;
  options.ranks_per_node = 1 << 20;
  options.latency_us = 0;
  return options;
}

SimulateOptions gpt(int64_t ranks) {
  SimulateOptions options;
  options.ranks = ranks;
  options.layers = 4;
  options.hidden = 8;
  options.heads = 2;
  options.seq_len = 16;
  options.vocab = 32;
  options.tflops = 1;
  options.node_gbps = 100;
  return options;
}

double seconds(const json& report, const char* part) { return report["step_seconds"][part].get<double>(); }

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

// gpipe: 3 (m + p - 1) of unit passes.
TEST(SimulateCommand, StepOfAPipeline) {
  const json report = Case::of(2, "gpipe", 2).report(in_seconds(2));
  EXPECT_NEAR(seconds(report, "compute"), 6, kRoundOff);
  EXPECT_NEAR(seconds(report, "bubble"), 3, kRoundOff);
  EXPECT_EQ(seconds(report, "messages"), 0);
  EXPECT_EQ(seconds(report, "data_parallel"), 0);
  EXPECT_EQ(report["step_seconds"]["update"], nullptr);
  EXPECT_NEAR(seconds(report, "total"), 9, kRoundOff);
  EXPECT_NEAR(report["passes"]["idle"].get<double>(), 1.0 / 3, kRoundOff);
  EXPECT_NEAR(report["samples_per_second"].get<double>(), 2.0 / 9, kRoundOff);
  EXPECT_EQ(report["tokens_per_second"], nullptr);
  EXPECT_EQ(report["per_rank"][1]["ranks"], (std::vector<int>{1, 1}));
  EXPECT_EQ(report["per_rank"][1]["parameters"], 1000);
  EXPECT_EQ(report["per_rank"][1]["layers"], "1");
}

TEST(SimulateCommand, OneRankOnlyComputes) {
  SimulateOptions options = in_seconds(1);
  options.node_gbps.reset();  // nothing is sent
  options.update_ms = 500;
  options.seq_len = 10;
  const json report = Case(json{{"gradient_accumulation_steps", 4}}).report(options);
  EXPECT_NEAR(seconds(report, "compute"), 4 * 3 * 2, kRoundOff);
  EXPECT_EQ(seconds(report, "bubble"), 0);
  EXPECT_EQ(seconds(report, "update"), 0.5);
  EXPECT_NEAR(seconds(report, "total"), 24.5, kRoundOff);
  EXPECT_NEAR(report["tokens_per_second"].get<double>(), 40 / 24.5, kRoundOff);
  EXPECT_EQ(report["sent_by_a_node_per_step"], 0);
}

// A message each way is on the critical path once: 2 of 0.25 s, and 0.1 s of latency each.
TEST(SimulateCommand, MessagesTakeTheirTime) {
  SimulateOptions options = in_seconds(2);
  options.message_bytes = 1000;
  options.node_gbps = 8e-6 * 4;  // 4000 bytes a second
  options.latency_us = 1e5;
  const Case one = Case::of(2, "gpipe", 1);
  json report = one.report(options);
  EXPECT_NEAR(seconds(report, "messages"), 2 * 0.35, kRoundOff);
  EXPECT_EQ(report["per_rank"][0]["sent_per_step"]["pipeline"], 1000);
  EXPECT_EQ(report["per_rank"][0]["bytes"]["messages"], 1000);
  EXPECT_EQ(report["sent_by_a_node_per_step"], 0);

  options.ranks_per_node = 1;
  options.link_gbps = 8e-6 * 2;
  report = one.report(options);
  EXPECT_NEAR(seconds(report, "messages"), 2 * 0.6, kRoundOff);
  EXPECT_EQ(report["sent_by_a_node_per_step"], 1000);

  options.message_ms = 50;
  EXPECT_NEAR(seconds(one.report(options), "messages"), 2 * 0.05, kRoundOff);
}

// 4 data-parallel ranks next to each other send at once, all of them through the link of their node.
TEST(SimulateCommand, PipelinesShareLinks) {
  SimulateOptions options = in_seconds(8);
  options.message_bytes = 1000;
  options.ranks_per_node = 4;
  options.node_gbps = 1;
  options.link_gbps = 8e-6 * 4;
  options.parameters = 2;
  const json report = Case::of(2, "gpipe", 1).report(options);
  EXPECT_NEAR(seconds(report, "messages"), 2 * 1.0, 1e-6);
  EXPECT_EQ(report["sent_by_a_node_per_step"], 4000);
  EXPECT_EQ(report["per_rank"][1]["ranks"], (std::vector<int>{4, 7}));
}

// A slow link holds up messages that a rank could compute faster than it sends: the last of 8 waits for the others.
TEST(SimulateCommand, ALinkIsBusyWithOneMessageAtATime) {
  SimulateOptions options = in_seconds(2);
  options.message_bytes = 1000;
  options.node_gbps = 8e-6 / 10;  // 10 s a message
  const json report = Case::of(2, "gpipe", 8).report(options);
  // The first forward, 8 messages, forward and backward, then 7 more backwards and their messages behind the first.
  EXPECT_NEAR(seconds(report, "total"), 1 + 80 + 1 + 2 + 80 + 2, 1e-6);
}

TEST(SimulateCommand, ReductionsAtTheEnd) {
  SimulateOptions options = in_seconds(2);
  options.parameters = 2'000'000;  // two buckets of a megabyte of elements
  options.layers = 2;
  options.node_gbps = 8e-3;  // a megabyte a second
  const auto with = [&](int stage, bool overlap) {
    return Case(json{{"gradient_accumulation_steps", 2},
                     {"zero_optimization", {{"stage", stage}, {"overlap_comm", overlap}}}})
        .report(options);
  };
  const json apart = with(0, false);
  const double bytes = apart["per_rank"][0]["sent_per_step"]["data_parallel"].get<double>();
  EXPECT_NEAR(bytes, 8e6, 1e4);  // an all-reduce between two: all of it
  EXPECT_NEAR(seconds(apart, "data_parallel"), bytes / 1e6, 1e-6);
  // Beside a backward of 4 s that makes one bucket, then the other.
  EXPECT_NEAR(seconds(with(0, true), "data_parallel"), bytes / 1e6 - 2, 1e-6);
  // Half of it is a reduction, half gathers parameters: beside a forward of 2 s, whatever overlap_comm says.
  EXPECT_NEAR(seconds(with(1, false), "data_parallel"), bytes / 2e6 + bytes / 2e6 - 1, 1e-6);
  EXPECT_NEAR(seconds(with(1, true), "data_parallel"), bytes / 2e6 - 2 + bytes / 2e6 - 1, 1e-6);
  // Stage 2 reduces in both micro-batches.
  EXPECT_NEAR(seconds(with(2, false), "data_parallel"), 2 * bytes / 2e6 + bytes / 2e6 - 1, 1e-6);
  // Stage 3 gathers in every pass, here after half of a forward of 2 s, half of a backward of 4 s.
  EXPECT_NEAR(seconds(with(3, false), "data_parallel"), 2 * (bytes / 2e6 - 1 + bytes / 2e6 - 2 + bytes / 2e6), 1e-6);
}

TEST(SimulateCommand, TiedWeightsAreReducedBetweenTheirRanks) {
  const Case pipe = Case::of(2, "gpipe", 1);
  SimulateOptions options = gpt(2);
  options.latency_us = 0;
  options.node_gbps = 8e-6;  // 1000 bytes a second
  const json apart = pipe.report(options);
  options.tied = true;
  const json tied = pipe.report(options);
  constexpr double kShared = 32 * 8 * 4;
  EXPECT_EQ(apart["parameters"].get<int64_t>() - tied["parameters"].get<int64_t>(), 32 * 8);
  EXPECT_NEAR(seconds(tied, "data_parallel"), kShared / 1000, 1e-6);
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(apart["per_rank"][rank]["parameters"], tied["per_rank"][rank]["parameters"]);
    EXPECT_EQ(tied["per_rank"][rank]["sent_per_step"]["pipeline"].get<double>() -
                  apart["per_rank"][rank]["sent_per_step"]["pipeline"].get<double>(),
              kShared);
  }
  // In a V one rank has both ends of the model.
  const json folded = Case::of(2, "zbv", 2).report(options);
  EXPECT_EQ(seconds(folded, "data_parallel"), 0);
  EXPECT_EQ(folded["per_rank"][0]["parameters"].get<int64_t>() + folded["per_rank"][1]["parameters"].get<int64_t>(),
            folded["parameters"].get<int64_t>());
}

TEST(SimulateCommand, MemoryOfARank) {
  SimulateOptions options = in_seconds(4);
  options.parameters = 4'000'000;
  options.activation_bytes = 4000;
  options.message_bytes = 10;
  const json report = Case::of(4, "1f1b", 8).report(options);
  for (int rank = 0; rank < 4; ++rank) {
    const json& bytes = report["per_rank"][rank]["bytes"];
    EXPECT_EQ(bytes["activations"], 1000 * (4 - rank)) << rank;
    EXPECT_EQ(bytes["messages"], rank == 0 || rank == 3 ? 10 : 20) << rank;
    EXPECT_NEAR(bytes["model_state"].get<double>(), 16e6, 1e3) << rank;  // parameter, gradient and two moments
    EXPECT_EQ(bytes["total"].get<int64_t>(), bytes["model_state"].get<int64_t>() + bytes["activations"].get<int64_t>() +
                                                 bytes["messages"].get<int64_t>());
    EXPECT_EQ(report["per_rank"][rank]["fits"], nullptr);
  }
  EXPECT_EQ(report["fullest"]["ranks"][0], 0);
}

TEST(SimulateCommand, ActivationCheckpointingCostsTimeAndSavesMemory) {
  SimulateOptions options = in_seconds(2);
  options.layers = 4;
  options.activation_bytes = 4000;
  options.message_bytes = 10;
  options.node_gbps = 1;
  Case pipe = Case::of(2, "1f1b", 4);
  options.activation_checkpointing = true;
  json report = pipe.report(options);
  EXPECT_NEAR(seconds(report, "compute"), 4 * 4, kRoundOff);
  // Inputs of the second layer alone, twice at once, and a layer that is computed again.
  EXPECT_EQ(report["per_rank"][0]["bytes"]["activations"], 2 * 10 + 1000);
  options.activation_checkpointing = false;
  EXPECT_NEAR(seconds(pipe.report(options), "compute"), 4 * 3, kRoundOff);
  pipe.config()["pipeline"]["activation_checkpoint_interval"] = 2;
  report = pipe.report(options);
  EXPECT_NEAR(seconds(report, "compute"), 4 * 4, kRoundOff);
  EXPECT_EQ(report["per_rank"][1]["bytes"]["activations"], 10 + 2000);
}

TEST(SimulateCommand, MeasuredTimesReplaceOperations) {
  SimulateOptions options = in_seconds(2);
  options.tflops.reset();
  options.flops.reset();
  options.forward_ms = "100,200";
  options.backward_input_ms = "100,200";
  options.backward_weight_ms = "100,200";
  const Case pipe = Case::of(2, "gpipe", 2);
  const json report = pipe.report(options);
  EXPECT_NEAR(seconds(report, "total"), 0.1 + 2 * 0.2 + 2 * 0.4 + 0.2, kRoundOff);
  EXPECT_NEAR(report["per_rank"][1]["busy_seconds"].get<double>(), 1.2, kRoundOff);
  options.forward_ms = options.backward_input_ms = options.backward_weight_ms = "100";
  EXPECT_NEAR(seconds(pipe.report(options), "total"), 0.9, kRoundOff);
}

TEST(SimulateCommand, EverySchedule) {
  double last = 0;
  for (const char* kind : {"dualpipev", "zb_h1", "1f1b", "gpipe"}) {  // less bubble first
    SimulateOptions options = in_seconds(4);
    options.layers = 8;
    const json report = Case::of(4, kind, 16).report(options);
    EXPECT_EQ(report["schedule"], kind);
    EXPECT_GE(seconds(report, "bubble"), last - kRoundOff) << kind;
    EXPECT_NEAR(seconds(report, "compute"), 16 * 3 * 0.5, kRoundOff);
    last = seconds(report, "bubble");
  }
}

TEST(SimulateCommand, FasterMachinesAreFaster) {
  const Case pipe = Case::of(4, "1f1b", 8, /*zero_stage=*/2);
  SimulateOptions options = gpt(64);
  options.ranks_per_node = 4;
  options.hidden = 64;
  const auto total = [&] { return seconds(pipe.report(options), "total"); };
  const double base = total();
  const auto expect_faster = [&](const char* what) {
    EXPECT_LT(total(), base) << what;
    options = gpt(64);
    options.ranks_per_node = 4;
    options.hidden = 64;
  };
  options.tflops = 2;
  expect_faster("tflops");
  options.node_gbps = 200;  // both links
  expect_faster("gbps");
  options.latency_us = 1;
  expect_faster("latency");
  options.layers = 3;
  expect_faster("layers");
  options.vocab = 16;
  expect_faster("vocab");
}

// The lists are those of 16 ranks, the rings those of all.
TEST(SimulateCommand, FourThousandRanks) {
  SimulateOptions options = gpt(4096);
  options.layers = 96;
  options.hidden = 12288;
  options.heads = 96;
  options.seq_len = 2048;
  options.vocab = 51200;
  options.tflops = 300;
  options.link_gbps = 3200;
  options.node_gbps = 2400;
  options.memory_gib = 80;
  options.flash_attention = true;
  Case pipe = Case::of(16, "1f1b", 64, /*zero_stage=*/1);
  pipe.config()["bf16"] = {{"enabled", true}};
  const json report = pipe.report(options, /*expected=*/1);
  EXPECT_EQ(report["data_parallel"], 256);
  EXPECT_EQ(report["parameters"], 175'244'992'512);
  EXPECT_EQ(report["per_rank"].size(), 16U);
  EXPECT_EQ(report["per_rank"][15]["ranks"], (std::vector<int>{3840, 4095}));
  // A message of 48 MiB leaves 8 ranks of a node, forwards or backwards 64 times; ring and gather once.
  constexpr int64_t kMessage = 2048LL * 12288 * 2;
  EXPECT_EQ(report["per_rank"][1]["sent_per_step"]["pipeline"], 2 * 64 * kMessage);
  EXPECT_GT(report["sent_by_a_node_per_step"].get<int64_t>(), 8 * 2 * 64 * kMessage);
  EXPECT_EQ(report["per_rank"][0]["fits"], false);
  EXPECT_EQ(report["per_rank"][15]["fits"], true);
  EXPECT_EQ(report["fits"], false);
  // 1f1b of equal stages idles 15/79 of the time; these are not quite equal.
  EXPECT_NEAR(report["passes"]["idle"].get<double>(), 15.0 / 79, 0.04);
}

TEST(SimulateCommand, PrintsTables) {
  SimulateOptions options = gpt(8);
  options.memory_gib = 1e-5;
  const Case pipe = Case::of(2, "interleaved", 4, /*zero_stage=*/1);
  const Outcome fullest = pipe.run(options);
  EXPECT_EQ(fullest.code, 1);
  EXPECT_EQ(fullest.err, "");
  EXPECT_THAT(
      fullest.out,
      AllOf(HasSubstr("ranks  8 = pipeline 2 x 2 stages x data parallel 4, on 1 node\n"),
            HasSubstr("batch  interleaved, 4 micro-batches of 1 sample, 16 in a step\n"),
            HasSubstr("4144 parameters in 8 layers, ZeRO stage 1, fp32\n"), HasSubstr("\n  bubble "),
            HasSubstr("not modelled: --update_ms"), HasSubstr("a rank, data parallel"), HasSubstr("tokens/s"),
            HasSubstr("the fullest (all: --per_rank)"), HasSubstr("does not fit"), HasSubstr("is needed by ranks ")));
  options.per_rank = true;
  options.memory_gib = 1;
  const Outcome all = pipe.run(options);
  EXPECT_EQ(all.code, 0);
  EXPECT_THAT(all.out, AllOf(HasSubstr("\n  0-3 "), HasSubstr("\n  4-7 "), Not(HasSubstr("does not fit"))));
}

TEST(SimulateCommand, Mistakes) {
  const Case pipe = Case::of(2, "1f1b", 4);
  const auto expect = [](const Case& with, const SimulateOptions& options, const std::string& part) {
    const Outcome outcome = with.run(options);
    EXPECT_EQ(outcome.code, 2) << part;
    EXPECT_EQ(outcome.out, "");
    EXPECT_THAT(outcome.err, HasSubstr(part));
  };
  const auto changed = [](auto change) {
    SimulateOptions options = gpt(4);
    change(options);
    return options;
  };
  expect(pipe, gpt(3), "expected a divisor of the 3 ranks, found 2");
  expect(pipe, changed([](SimulateOptions& o) { o.parameters = 5; }), "found both");
  expect(pipe, changed([](SimulateOptions& o) { o.hidden = o.heads = o.vocab = {}; }), "found neither");
  expect(pipe, changed([](SimulateOptions& o) { o.seq_len = {}; }), "a GPT needs all of --layers");
  expect(pipe, changed([](SimulateOptions& o) { o.heads = 3; }), "--hidden 8 does not divide by --heads 3");
  expect(pipe, changed([](SimulateOptions& o) { o.layers = 0; }),
         "--layers: expected a whole number from 1 to 10000, found 0");
  expect(pipe, changed([](SimulateOptions& o) { o.tflops = {}; }), "expected --tflops");
  expect(pipe, changed([](SimulateOptions& o) { o.tflops = -1; }), "--tflops: expected a positive number from");
  expect(pipe, changed([](SimulateOptions& o) { o.node_gbps = {}; }), "expected --link_gbps");
  expect(pipe, changed([](SimulateOptions& o) { o.latency_us = -1; }), "--latency_us");
  expect(pipe, changed([](SimulateOptions& o) { o.ranks_per_node = 0; }), "--ranks_per_node");
  expect(pipe, changed([](SimulateOptions& o) { o.forward_ms = "1"; }), "belong together");
  for (const char* list : {"1,", ",1", "x", "1;2", "-1", "nan"}) {
    expect(pipe, changed([&](SimulateOptions& o) {
             o.forward_ms = list;
             o.backward_input_ms = o.backward_weight_ms = "1";
           }),
           "--forward_ms");
  }
  expect(pipe, changed([](SimulateOptions& o) {
           o.forward_ms = "1,2,3";
           o.backward_input_ms = o.backward_weight_ms = "1,2,3";
         }),
         "2 stages, found 3");
  expect(pipe, changed([](SimulateOptions& o) {
           o.forward_ms = "1,2";
           o.backward_input_ms = o.backward_weight_ms = "1";
         }),
         "found 2, 1 and 1");
  SimulateOptions sums = in_seconds(2);
  sums.flops = {};
  expect(pipe, sums, "expected --flops");
  sums = in_seconds(2);
  sums.parameters = {};
  expect(pipe, sums, "expected --parameters");
  expect(Case::of(16, "1f1b", 4), gpt(16), "found 8 layers for 16");
  Case compressed = Case::of(1, "1f1b", 4);
  compressed.config()["gradient_compression"] = {{"method", "sign"}};
  expect(compressed, gpt(4), "gradient_compression.method");
}

// Each was a bad_alloc after seconds, or a count that had wrapped around.
TEST(SimulateCommand, HugeSizesAreRefusedAtOnce) {
  const Case pipe = Case::of(2, "1f1b", 4);
  const auto expect = [](const Case& with, const SimulateOptions& options, const std::string& part) {
    const auto begin = std::chrono::steady_clock::now();
    const Outcome outcome = with.run(options);
    EXPECT_EQ(outcome.code, 2) << part;
    EXPECT_THAT(outcome.err, HasSubstr(part));
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
  };
  const auto changed = [](auto change) {
    SimulateOptions options = gpt(4);
    change(options);
    return options;
  };
  expect(pipe, changed([](SimulateOptions& o) { o.layers = 100'000'000; }), "--layers: expected");
  expect(pipe, changed([](SimulateOptions& o) { o.layers = INT64_MAX; }), "--layers: expected");
  expect(pipe, changed([](SimulateOptions& o) { o.vocab = INT64_MAX; }), "--vocab: expected");
  expect(pipe, changed([](SimulateOptions& o) { o.hidden = 4'000'000'000; }), "parameters, found 7.68e+20");
  expect(pipe, changed([](SimulateOptions& o) { o.seq_len = 1'000'000'000'000; }),
         "activations: expected at most 2^60");
  expect(pipe, changed([](SimulateOptions& o) { o.ranks = int64_t{1} << 40; }), "--ranks: expected");
  expect(Case::of(1000, "1f1b", 1000), changed([](SimulateOptions& o) {
           o.layers = 10'000;
           o.ranks = 1000;
         }),
         "layers^2 x stages");
  SimulateOptions sums = in_seconds(4);
  sums.parameters = int64_t{1} << 62;
  expect(pipe, sums, "--parameters: expected");
  sums = in_seconds(4);
  sums.message_bytes = 1e25;
  expect(pipe, sums, "messages of a step: expected at most 2^60 bytes");
  expect(Case::of(2, "1f1b", 2'000'000'000), in_seconds(4), "gradient_accumulation_steps of at most");
  Case small = Case::of(1, "1f1b", 1, 3);
  small.config()["zero_optimization"]["reduce_bucket_size"] = 1;
  sums = in_seconds(4);
  sums.parameters = int64_t{1} << 50;
  expect(small, sums, "expected fewer than 4194304 buckets");
}

TEST(SimulateCommand, TheLargestModelOfSumsIsCounted) {
  SimulateOptions options = in_seconds(1 << 20);
  options.parameters = int64_t{1} << 50;
  EXPECT_EQ(Case::of(1, "1f1b", 8, 3).report(options)["parameters"], int64_t{1} << 50);
}

TEST(SimulateCommand, MistakesAreInJsonToo) {
  SimulateOptions options = gpt(3);
  options.json = true;
  const Outcome outcome = Case::of(2, "1f1b", 4).run(options);
  EXPECT_EQ(outcome.code, 2);
  EXPECT_EQ(json::parse(outcome.out)["ok"], false);
}

}  // namespace
}  // namespace ds::tool
