#include "tests/parity/gpt_job.h"

#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <stdexcept>
#include <thread>
#include <tuple>

namespace ds::test {
namespace {

namespace fs = std::filesystem;

std::string quoted(const std::string& word) { return "'" + word + "'"; }

std::pair<int, std::string> run_shell(const std::string& command) {
  FILE* pipe = popen((command + " 2>&1").c_str(), "r");
  if (pipe == nullptr) throw std::runtime_error("cannot start: " + command);
  std::string output;
  std::array<char, 4096> buffer{};
  while (const size_t count = fread(buffer.data(), 1, buffer.size(), pipe)) output.append(buffer.data(), count);
  const int status = pclose(pipe);
  return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), output};
}

// Words that end with a zero byte each, as the kernel shows arguments and environment.
bool has_word(const fs::path& file, const std::string& word) {
  std::ifstream in(file);
  for (std::string found; std::getline(in, found, '\0');) {
    if (found == word) return true;
  }
  return false;
}

// Calls `action` once the file has something in it, unless `over` comes first.
void when_written(const fs::path& file, const std::atomic<bool>& over,
                  const std::function<void(const fs::path&)>& action) {
  std::error_code none;
  while (fs::file_size(file, none) == 0 || none) {
    if (over) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  action(file);
}

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
  std::string command = "OMP_NUM_THREADS=1 " + quoted(DS_LAUNCH) + " --num_procs " + std::to_string(job.ranks);
  if (!job.limits.empty()) command += " bash -c " + quoted(job.limits + R"(; exec "$0" "$@")");
  command += " " + quoted(DS_GPT) + " --deepspeed_config " + quoted(config.string()) + " --data " +
             quoted(job.data.empty() ? source_path("tests/parity/data/kjv_1m.bin").string() : job.data) +
             " --order sequential --generate 0 --steps " + std::to_string(job.steps) + " --metrics " +
             quoted(metrics.string());
  if (job.activation_checkpointing) command += " --activation_checkpointing";
  for (const std::string& argument : job.arguments) command += " " + quoted(argument);
  std::atomic<bool> over = false;
  std::thread beside;
  if (job.during) beside = std::thread([&] { when_written(metrics, over, job.during); });
  GptResult result;
  std::tie(result.exit_code, result.output) = run_shell(command);
  over = true;
  if (beside.joinable()) beside.join();
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
  if (static_cast<int>(result.steps.size()) != job.steps) {
    throw std::runtime_error("gpt wrote metrics of " + std::to_string(result.steps.size()) + " steps, expected " +
                             std::to_string(job.steps));
  }
  return result;
}

std::pair<int, std::string> launch(const std::string& arguments) {
  return run_shell(quoted(DS_LAUNCH) + " " + arguments);
}

pid_t process_of_rank(const fs::path& metrics, int rank) {
  std::error_code none;  // processes come and go
  for (const auto& entry : fs::directory_iterator("/proc", none)) {
    const std::string name = entry.path().filename();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    if (!has_word(entry.path() / "environ", "RANK=" + std::to_string(rank))) continue;
    if (has_word(entry.path() / "cmdline", metrics.string())) return std::stoi(name);
  }
  return 0;
}

std::vector<double> losses_of(const GptResult& run) {
  std::vector<double> result;
  for (const nlohmann::json& step : run.steps) {
    result.push_back(step["loss"]);
    result.push_back(step["grad_norm"]);
  }
  return result;
}

fs::path build_disk() { return fs::read_symlink("/proc/self/exe").parent_path(); }

fs::path source_path(const std::string& relative) { return fs::path(DS_SOURCE_DIR) / relative; }

}  // namespace ds::test
