// The command line of examples/gpt.
#pragma once

#include <dsengine/config.h>

#include <cstdint>
#include <optional>
#include <string>

#include "gpt_model.h"
#include "token_batches.h"

namespace gpt {

struct GptOptions {
  std::string deepspeed_config;
  std::optional<std::string> data;
  GptConfig model;
  int64_t seq_len = 128;               // tokens of a training sequence: the model's context, or less with load_hf
  std::optional<std::string> load_hf;  // a folder with a GPT-2; `model` is what its config.json says
  int64_t steps = kDefaultSteps;       // optimizer steps; 0: only load, save, generate
  std::optional<std::string> init;
  std::optional<std::string> save;
  std::optional<std::string> export_hf;
  std::optional<std::string> save_checkpoint;
  int64_t save_interval = 0;                // steps; 0: only after the last
  std::optional<int64_t> keep_checkpoints;  // 0: all; not given: as the ds_config says
  std::optional<std::string> load_checkpoint;
  Order order = Order::kRandom;
  std::optional<std::string> metrics;
  int64_t generate = 400;  // bytes of sampled text at the end
  uint64_t seed = 1234;
  // Options of a pipeline; without them there is one model on every rank.
  std::optional<int> pipeline_stages;
  std::optional<std::string> pipeline_schedule;
  std::optional<std::string> pipeline_trace;
  ds::engine::config::AutoValues auto_values;  // for what the ds_config leaves "auto"
  std::string device;                          // "auto" (also when empty), "cpu", "cuda"

  static constexpr int64_t kDefaultSteps = 1000;
};

// Nothing when the user asked for help, which has been printed then. Reads the config.json of --load_hf. Throws
// ds::ConfigError for arguments that are wrong, with the parser's explanation; and as read_gpt2_config(). Also takes,
// and ignores, what DeepSpeed's launcher hands to programs:
// --local_rank N, --deepspeed.
std::optional<GptOptions> parse_options(int argc, const char* const* argv);

}  // namespace gpt
