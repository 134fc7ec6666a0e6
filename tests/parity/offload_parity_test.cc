// The GPT example with optimizer and parameters in host memory and in files, against plain torch: the curves are those
// of the jobs that keep everything where it is.
#include <gtest/gtest.h>

#include <ostream>
#include <string>
#include <vector>

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
  const char* precision = "fp32";
};

std::ostream& operator<<(std::ostream& out, const OffloadJob& job) { return out << job.name; }

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

class OffloadParity : public testing::TestWithParam<OffloadJob> {};

TEST_P(OffloadParity, AgreesWithTorch) {
  const OffloadJob& job = GetParam();
  const std::string precision = job.precision;
  const DiskFolder folder;
  nlohmann::json config = reference_config(job.stage, 1, job.accumulation);
  nlohmann::json& zero = config["zero_optimization"];
  if (!job.optimizer.is_null()) zero["offload_optimizer"] = in_files(folder, job.optimizer);
  if (!job.parameters.is_null()) zero["offload_param"] = in_files(folder, job.parameters);
  if (precision != "fp32") config[precision] = {{"enabled", true}};
  if (precision == "fp16") config["fp16"]["loss_scale"] = 256;
  // 16 bits are slow on a CPU that does not compute in them.
  const GptResult run = run_gpt({.config = config, .ranks = job.ranks, .steps = precision == "fp32" ? 50 : 12});
  const std::string curve = precision + "_batch" + std::to_string(job.ranks * job.accumulation);
  if (precision == "fp32") {
    expect_curve(run, curve);
  } else {
    // See Bfloat16StaysWithinItsRounding.
    expect_curve(run, curve, kHalfTolerance, 4e-2);
  }
}

INSTANTIATE_TEST_SUITE_P(Jobs, OffloadParity,
                         testing::Values(OffloadJob{"Stage1HostRanks1", 1, 1, 2, kHost, {}},
                                         OffloadJob{"Stage1FilePipelinedRanks2", 1, 2, 2, kStatesPipelined, {}},
                                         OffloadJob{"Stage2HalfOnHostRanks3", 2, 3, 1, kHalfOnHost, {}},
                                         OffloadJob{"Stage2HalfInFileRanks2", 2, 2, 1, kHalfOfStates, {}},
                                         OffloadJob{"Stage3HostRanks2", 3, 2, 1, kHost, kHost},
                                         OffloadJob{"Stage3HalfOnHostParametersInFileRanks2", 3, 2, 1, kHalfOnHost,
                                                    kHalfInFile},
                                         OffloadJob{"Stage3ParametersInFileRanks1", 3, 1, 1, {}, kFile},
                                         OffloadJob{"Stage3AllInFilesRanks2", 3, 2, 2, kStatesPipelined, kFile},
                                         OffloadJob{"Stage1Bfloat16FileRanks2", 1, 2, 1, kStates, {}, "bf16"},
                                         OffloadJob{"Stage3Bfloat16AllInFilesRanks2", 3, 2, 1, kStates, kFile, "bf16"},
                                         OffloadJob{"Stage2Float16HalfOnHostRanks2", 2, 2, 1, kHalfOnHost, {}, "fp16"}),
                         [](const auto& variant) { return std::string(variant.param.name); });

}  // namespace
}  // namespace ds::test
