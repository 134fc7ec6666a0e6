// `ds-tool simulate`: predicts time and memory of a step on thousands of ranks, without starting one. Torch-free.
// simulation.h says what is modelled.
#pragma once

#include <cstdint>
#include <optional>
#include <ostream>
#include <string>

namespace ds::tool {

struct SimulateOptions {
  std::string config;  // a path, or url-safe base64 of JSON
  int64_t ranks = 1;   // of the job
  bool strict = false;

  // The model: a GPT ...
  std::optional<int64_t> layers;
  std::optional<int64_t> hidden;
  std::optional<int64_t> heads;
  std::optional<int64_t> seq_len;  // tokens of a sample; without a GPT for tokens per second alone
  std::optional<int64_t> vocab;
  bool tied = false;
  bool flash_attention = false;
  // ... or the totals of any model, for forward and one micro-batch; `layers` share them evenly (by default one layer a
  // stage).
  std::optional<int64_t> parameters;
  std::optional<double> flops;
  std::optional<double> activation_bytes;
  std::optional<double> message_bytes;    // between stages
  bool activation_checkpointing = false;  // of each layer; else as pipeline.activation_checkpoint_interval says

  // The machine. Of rates that are not given, one takes the other's value.
  std::optional<double> tflops;     // 10^12 operations a second, of a rank, as achieved
  std::optional<double> link_gbps;  // 10^9 bits a second, of a node to others
  std::optional<double> node_gbps;  // of a rank inside its node
  int64_t ranks_per_node = 8;
  double latency_us = 10;
  std::optional<double> memory_gib;  // of a rank, to compare with

  // Measured, in place of operations and bytes: milliseconds, one number for all stages, or one for each ("1.5,2").
  std::string forward_ms;
  std::string backward_input_ms;
  std::string backward_weight_ms;
  std::optional<double> message_ms;
  double update_ms = 0;

  bool per_rank = false;  // every rank of a pipeline, not the fullest alone
  bool json = false;      // one JSON object instead of text
};

// Writes the forecast to `out` and mistakes to `err`. Returns the exit code: 0; 1 when ranks need more than memory_gib;
// 2 when the config or an option is wrong.
int simulate(const SimulateOptions& options, std::ostream& out, std::ostream& err);

}  // namespace ds::tool
