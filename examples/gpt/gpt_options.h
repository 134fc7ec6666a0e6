// The command line of examples/gpt.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "examples/gpt/gpt_model.h"
#include "examples/gpt/token_batches.h"

namespace gpt {

struct GptOptions {
  std::string deepspeed_config;
  std::optional<std::string> data;
  GptConfig model;
  int64_t steps = kDefaultSteps;  // optimizer steps; 0: only load, save, generate
  std::optional<std::string> init;
  std::optional<std::string> save;
  Order order = Order::kRandom;
  std::optional<std::string> metrics;
  int64_t generate = 400;  // bytes of sampled text at the end
  uint64_t seed = 1234;
  std::string device;  // "cpu", "cuda", or empty: cpu

  static constexpr int64_t kDefaultSteps = 1000;
};

// Nothing when the user asked for help, which has been printed then. Throws ds::ConfigError for arguments that are
// wrong, with the parser's explanation. Also takes, and ignores, what DeepSpeed's launcher hands to programs:
// --local_rank N, --deepspeed.
std::optional<GptOptions> parse_options(int argc, const char* const* argv);

}  // namespace gpt
