// ds-tool simulate. Numbers are worked out by hand.
#include "tools/simulate_command.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "tests/tools/command_outcome.h"
#include "tests/tools/simulated_case.h"

namespace ds::tool {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr double kRoundOff = 1e-9;

double seconds(const json& report, const char* part) { return report["step_seconds"][part].get<double>(); }

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

}  // namespace
}  // namespace ds::tool
