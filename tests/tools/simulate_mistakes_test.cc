// ds-tool simulate: what it refuses, and how it says so.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/tools/command_outcome.h"
#include "tests/tools/simulated_case.h"
#include "tools/simulate_command.h"

namespace ds::tool {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

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
