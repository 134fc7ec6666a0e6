// Pipelines together with what a config switches on: precisions, offload, optimizers, groups.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "tests/pipeline/pipeline_job.h"

namespace ds::pipeline {
namespace {

// The same training on one stage, with something changed in the config.
using Change = std::function<void(nlohmann::json&)>;
struct Variant {
  std::string name;
  int zero_stage = 1;
  Change change;
  double tolerance = 5e-6;
  int data_ranks = 2;
};

const std::vector<Variant>& variants() {
  static const std::vector<Variant> kAll = {
      {"Bfloat16", 1, [](nlohmann::json& c) { c["bf16"]["enabled"] = true; }, 2e-3},
      {"Bfloat16Stage3", 3, [](nlohmann::json& c) { c["bf16"]["enabled"] = true; }, 2e-3},
      {"Float16", 2,
       [](nlohmann::json& c) {
         c["fp16"] = {{"enabled", true}, {"initial_scale_power", 8}};
       },
       2e-3},
      {"OffloadOptimizer", 1,
       [](nlohmann::json& c) {
         c["zero_optimization"]["offload_optimizer"] = {{"device", "cpu"}};
       }},
      {"OffloadOptimizerStage2", 2,
       [](nlohmann::json& c) {
         c["zero_optimization"]["offload_optimizer"] = {{"device", "cpu"}};
       }},
      {"OffloadAllStage3", 3,
       [](nlohmann::json& c) {
         c["zero_optimization"]["offload_optimizer"] = {{"device", "cpu"}};
         c["zero_optimization"]["offload_param"] = {{"device", "cpu"}};
       }},
      {"DelayedUpdate", 1,
       [](nlohmann::json& c) {
         c["zero_optimization"]["offload_optimizer"] = {{"device", "cpu"}, {"delayed_update", true}};
       }},
      {"ActivationCheckpoints", 1, [](nlohmann::json& c) { c["pipeline"]["activation_checkpoint_interval"] = 1; }},
      {"SumOfGradients", 1, [](nlohmann::json& c) { c["gradient_allreduce_op"] = "sum"; }},
      {"ClippedByValue", 0,
       [](nlohmann::json& c) {
         c.erase("gradient_clipping");
         c["gradient_clip_by_value"] = 1e-3;
       }},
      {"CopiesOnGroups", 2, [](nlohmann::json& c) { c["zero_optimization"]["mics_shard_size"] = 2; }, 5e-6, 4},
      {"SecondarySlices", 3, [](nlohmann::json& c) { c["zero_optimization"]["zero_hpz_partition_size"] = 2; }, 5e-6, 4},
      {"CompressedGradients", 2,
       [](nlohmann::json& c) {
         c["gradient_compression"] = {{"method", "int8"}};
       },
       2e-3},
      {"Muon", 1,
       [](nlohmann::json& c) {
         c["optimizer"] = {{"type", "Muon"}, {"params", {{"lr", 1e-3}}}};
       }},
      {"Lamb", 1,
       [](nlohmann::json& c) {
         c["optimizer"] = {{"type", "Lamb"}, {"params", {{"lr", 1e-2}}}};
         c["zero_allow_untested_optimizer"] = true;
       }},
  };
  return kAll;
}

class PipelineVariants : public testing::TestWithParam<size_t> {};

TEST_P(PipelineVariants, TrainAsOnOneStage) {
  const Variant& variant = variants()[GetParam()];
  nlohmann::json alone = config_of(1, "1f1b", variant.zero_stage);
  variant.change(alone);
  const std::vector<double> wanted = losses_of({.ranks = variant.data_ranks, .config = alone});
  ASSERT_LT(wanted.back(), wanted.front());
  for (const char* schedule : {"1f1b", "zb_h1", "zbv"}) {
    SCOPED_TRACE(schedule);
    nlohmann::json config = config_of(2, schedule, variant.zero_stage);
    variant.change(config);
    expect_near(losses_of({.ranks = 2 * variant.data_ranks, .config = config}), wanted, variant.tolerance);
  }
}

std::string name_of_variant(const testing::TestParamInfo<size_t>& index) { return variants()[index.param].name; }

INSTANTIATE_TEST_SUITE_P(Config, PipelineVariants, testing::Range(size_t{0}, variants().size()), name_of_variant);

}  // namespace
}  // namespace ds::pipeline
