// A job for ds-tool simulate: a ds_config, and machines whose numbers are easy to work out.
#pragma once

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "tests/support/scratch_folder.h"
#include "tests/tools/command_outcome.h"
#include "tools/simulate_command.h"

namespace ds::tool {

// Of a ds_config.
class Case {
 public:
  explicit Case(nlohmann::json config) : config_(std::move(config)) {
    config_["optimizer"] = {{"type", "AdamW"}};
    if (!config_.contains("train_micro_batch_size_per_gpu")) config_["train_micro_batch_size_per_gpu"] = 1;
  }
  // Stages, a schedule and micro-batches.
  static Case of(int stages, const std::string& schedule, int micro_batches, int zero_stage = 0) {
    return Case({{"pipeline", {{"stages", stages}, {"schedule", schedule}}},
                 {"gradient_accumulation_steps", micro_batches},
                 {"zero_optimization", {{"stage", zero_stage}}}});
  }
  nlohmann::json& config() { return config_; }

  Outcome run(SimulateOptions options) const {
    options.config = folder_.write("ds_config.json", config_.dump());
    return outcome_of([&](auto& out, auto& err) { return simulate(options, out, err); });
  }
  nlohmann::json report(SimulateOptions options, int expected = 0) const {
    options.json = true;
    options.per_rank = true;
    const Outcome outcome = run(options);
    EXPECT_EQ(outcome.code, expected) << outcome.err;
    return outcome.code == expected ? nlohmann::json::parse(outcome.out) : nlohmann::json();
  }

 private:
  test::ScratchFolder folder_;
  nlohmann::json config_;
};

// One operation takes a second on each of two equal layers; a byte takes a second.
inline SimulateOptions in_seconds(int64_t ranks) {
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

inline SimulateOptions gpt(int64_t ranks) {
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

}  // namespace ds::tool
