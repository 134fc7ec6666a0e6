// The GPT example with optimizer and parameters in host memory and in files, against plain torch: the curves are those
// of the jobs that keep everything where it is.
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "tests/parity/expect_curve.h"
#include "tests/parity/gpt_job.h"

namespace ds::test {
namespace {

struct OffloadJob {
  const char* name;
  int stage;
  int ranks;
  int accumulation;
  nlohmann::json optimizer;   // offload_optimizer; null: stays
  nlohmann::json parameters;  // offload_param
  std::string precision = "fp32";

  Curve curve() const { return {.global_batch = ranks * accumulation, .precision = precision}; }
};

nlohmann::json in_files(const DiskFolder& folder, nlohmann::json section) {
  if (section["device"] == "nvme") section["nvme_path"] = folder.path().string();
  return section;
}

const nlohmann::json kHost = {{"device", "cpu"}};
const nlohmann::json kHalfOnHost = {{"device", "cpu"}, {"ratio", 0.5}};
const nlohmann::json kFile = {{"device", "nvme"}, {"max_in_cpu", 0}};
const nlohmann::json kHalfInFile = {{"device", "nvme"}, {"max_in_cpu", 200000}};
const nlohmann::json kStates = {{"device", "nvme"}};
const nlohmann::json kStatesPipelined = {{"device", "nvme"}, {"pipeline_read", true}, {"pipeline_write", true}};
const nlohmann::json kHalfOfStates = {{"device", "nvme"}, {"ratio", 0.5}};

const std::vector<OffloadJob> kJobs = {
    {"stage 1, host, 1 rank", 1, 1, 2, kHost, {}},
    {"stage 1, file pipelined", 1, 2, 2, kStatesPipelined, {}},
    {"stage 2, half on host, 3 ranks", 2, 3, 1, kHalfOnHost, {}},
    {"stage 2, half in file", 2, 2, 1, kHalfOfStates, {}},
    {"stage 3, host", 3, 2, 1, kHost, kHost},
    {"stage 3, half on host, parameters in file", 3, 2, 1, kHalfOnHost, kHalfInFile},
    {"stage 3, parameters in file, 1 rank", 3, 1, 1, {}, kFile},
    {"stage 3, all in files", 3, 2, 2, kStatesPipelined, kFile},
    {"stage 1, bfloat16, file", 1, 2, 1, kStates, {}, "bf16"},
    {"stage 3, bfloat16, all in files", 3, 2, 1, kStates, kFile, "bf16"},
    {"stage 2, float16, half on host", 2, 2, 1, kHalfOnHost, {}, "fp16"},
};

void expect_agreement(const OffloadJob& job) {
  SCOPED_TRACE(job.name);
  const DiskFolder folder;
  nlohmann::json config = reference_config(job.stage, 1, job.accumulation);
  nlohmann::json& zero = config["zero_optimization"];
  if (!job.optimizer.is_null()) zero["offload_optimizer"] = in_files(folder, job.optimizer);
  if (!job.parameters.is_null()) zero["offload_param"] = in_files(folder, job.parameters);
  if (job.precision != "fp32") config[job.precision] = {{"enabled", true}};
  if (job.precision == "fp16") config["fp16"]["loss_scale"] = 256;
  // 16 bits are slow on a CPU that does not compute in them.
  const int steps = job.precision == "fp32" ? compared_steps() : 12;
  expect_curve({.config = config, .ranks = job.ranks, .steps = steps}, job.curve());
}

std::set<std::string> curves() {
  std::set<std::string> names;
  for (const OffloadJob& job : kJobs) names.insert(job.curve().name());
  return names;
}

// By curve, so that each is computed once.
class OffloadParity : public testing::TestWithParam<std::string> {};

TEST_P(OffloadParity, AgreesWithTorch) {
  for (const OffloadJob& job : kJobs) {
    if (job.curve().name() == GetParam()) expect_agreement(job);
  }
}

INSTANTIATE_TEST_SUITE_P(Jobs, OffloadParity, testing::ValuesIn(curves()),
                         [](const auto& variant) { return variant.param; });

}  // namespace
}  // namespace ds::test
