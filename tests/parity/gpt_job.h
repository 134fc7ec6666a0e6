// Runs examples/gpt under ds-launch as a user would, and reads its metrics.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace ds::test {

struct GptJob {
  nlohmann::json config;
  int ranks = 1;
  int steps = 50;
  std::string data = {};                    // empty: the reference text
  std::vector<std::string> arguments = {};  // further ones of gpt
  bool activation_checkpointing = false;
};

struct GptResult {
  int exit_code = 0;
  std::string output;
  std::vector<nlohmann::json> steps;  // one per optimizer step
  nlohmann::json summary;
};

// A fp32 AdamW job of the reference: lr 1e-3, weight decay 0.01, clipping 1.0.
nlohmann::json reference_config(int stage, int micro_batch, int accumulation);

// Throws std::runtime_error with the program's output when it does not exit with 0.
GptResult run_gpt(const GptJob& job);
// As run_gpt, whatever the exit code.
GptResult try_gpt(const GptJob& job);

// tests/parity/reference.json
const nlohmann::json& reference();

std::filesystem::path source_path(const std::string& relative);

}  // namespace ds::test
