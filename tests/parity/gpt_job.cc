#include "tests/parity/gpt_job.h"

#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <stdexcept>

#include "tests/support/scratch_folder.h"

namespace ds::test {
namespace {

namespace fs = std::filesystem;

std::string quoted(const std::string& word) { return "'" + word + "'"; }

}  // namespace

nlohmann::json reference_config(int stage, int micro_batch, int accumulation) {
  nlohmann::json zero = {{"stage", stage}};
  // Small enough for this model: a bucket for every block, each gathered for forward and again for backward.
  if (stage == 3) {
    zero["stage3_param_persistence_threshold"] = 1000;
    zero["stage3_max_live_parameters"] = 450000;
    zero["stage3_max_reuse_distance"] = 0;
  }
  return {{"train_micro_batch_size_per_gpu", micro_batch},
          {"gradient_accumulation_steps", accumulation},
          {"gradient_clipping", 1.0},
          {"optimizer", {{"type", "AdamW"}, {"params", {{"lr", 1e-3}, {"weight_decay", 0.01}}}}},
          {"zero_optimization", zero}};
}

GptResult try_gpt(const GptJob& job) {
  const ScratchFolder scratch;
  const fs::path config = scratch.path() / "ds_config.json";
  const fs::path metrics = scratch.path() / "metrics.jsonl";
  std::ofstream(config) << job.config.dump(1);
  std::string command = "OMP_NUM_THREADS=1 " + quoted(DS_LAUNCH) + " --num_procs " + std::to_string(job.ranks) + " " +
                        quoted(DS_GPT) + " --deepspeed_config " + quoted(config.string()) + " --data " +
                        quoted(job.data.empty() ? source_path("tests/parity/data/kjv_1m.bin").string() : job.data) +
                        " --order sequential --generate 0 --steps " + std::to_string(job.steps) + " --metrics " +
                        quoted(metrics.string());
  if (job.activation_checkpointing) command += " --activation_checkpointing";
  for (const std::string& argument : job.arguments) command += " " + quoted(argument);
  command += " 2>&1";
  GptResult result;
  FILE* pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) throw std::runtime_error("cannot start: " + command);
  std::array<char, 4096> buffer{};
  while (const size_t count = fread(buffer.data(), 1, buffer.size(), pipe)) result.output.append(buffer.data(), count);
  const int status = pclose(pipe);
  result.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  std::ifstream lines(metrics);
  for (std::string line; std::getline(lines, line);) {
    nlohmann::json entry = nlohmann::json::parse(line);
    if (entry.contains("summary")) {
      result.summary = entry["summary"];
    } else {
      result.steps.push_back(std::move(entry));
    }
  }
  return result;
}

GptResult run_gpt(const GptJob& job) {
  GptResult result = try_gpt(job);
  if (result.exit_code != 0) {
    throw std::runtime_error("gpt ended with exit code " + std::to_string(result.exit_code) + ":\n" + result.output);
  }
  return result;
}

const nlohmann::json& reference() {
  static const nlohmann::json instance =
      nlohmann::json::parse(std::ifstream(source_path("tests/parity/reference.json")));
  return instance;
}

fs::path source_path(const std::string& relative) { return fs::path(DS_SOURCE_DIR) / relative; }

}  // namespace ds::test
