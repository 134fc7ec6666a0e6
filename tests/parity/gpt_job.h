// Runs examples/gpt under ds-launch as a user would, and reads its metrics.
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/scratch_folder.h"

namespace ds::test {

struct GptJob {
  nlohmann::json config;
  int ranks = 1;
  int steps = 50;
  std::string data = {};                    // empty: the reference text
  std::vector<std::string> arguments = {};  // further ones of gpt
  bool activation_checkpointing = false;
  std::string limits = {};  // shell command that each rank begins with: "ulimit -d 400000"
  // Called on a thread of its own when the first step is done, with the file of the metrics.
  std::function<void(const std::filesystem::path& metrics)> during = {};
};

struct GptResult {
  int exit_code = 0;
  std::string output;
  std::vector<nlohmann::json> steps;  // one per optimizer step
  nlohmann::json summary;
};

// A fp32 AdamW job of the reference: lr 1e-3, weight decay 0.01, clipping 1.0.
nlohmann::json reference_config(int stage, int micro_batch, int accumulation);

// Throws std::runtime_error with the program's output when it does not exit with 0 or does not make its steps.
GptResult run_gpt(const GptJob& job);
// As run_gpt, whatever the exit code.
GptResult try_gpt(const GptJob& job);

// Runs ds-launch with these arguments, as a shell reads them; gives its exit code and output.
std::pair<int, std::string> launch(const std::string& arguments);

// The process of a rank of the job that writes this file of metrics; 0: there is none.
pid_t process_of_rank(const std::filesystem::path& metrics, int rank);

// Loss and norm of every step.
std::vector<double> losses_of(const GptResult& run);

// A folder for files of offloaded state: on the disk of the build, since /tmp may be memory.
std::filesystem::path build_disk();
class DiskFolder : public ScratchFolder {
 public:
  DiskFolder() : ScratchFolder(build_disk()) {}
};

std::filesystem::path source_path(const std::string& relative);

}  // namespace ds::test
