// The text of a flops profile.
#include "profiling/flops_report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

namespace ds::profiling {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

FlopsProfile small_profile() {
  return {.modules = {{.name = "",
                       .type = "Net",
                       .parameters = 1100,
                       .macs = 3000,
                       .flops = 6500,
                       .backward_macs = 6000,
                       .backward_flops = 13000,
                       .recomputed_flops = 500,
                       .seconds = 2e-3},
                      {.name = "h",
                       .type = "ModuleList",
                       .parent = 0,
                       .depth = 1,
                       .parameters = 1000,
                       .macs = 2500,
                       .flops = 5100,
                       .seconds = 1.5e-3},
                      {.name = "h.0",
                       .type = "Block",
                       .parent = 1,
                       .depth = 2,
                       .parameters = 500,
                       .macs = 1500,
                       .flops = 3000,
                       .seconds = 1e-3},
                      {.name = "h.1",
                       .type = "Block",
                       .parent = 1,
                       .depth = 2,
                       .parameters = 500,
                       .macs = 1000,
                       .flops = 2100,
                       .seconds = 5e-4},
                      {.name = "head",
                       .type = "Linear",
                       .parent = 0,
                       .depth = 1,
                       .parameters = 100,
                       .macs = 500,
                       .flops = 1000,
                       .seconds = 1e-4}},
          .unknown_operators = {"mine::conv"},
          .text = {}};
}

TEST(FlopsReport, AStepOfAnEngine) {
  const StepFlops step{.step = 2,
                       .world_size = 8,
                       .data_parallel_size = 4,
                       .model_parallel_size = 2,
                       .batch_size = 3,
                       .model_parameters = 2'200,
                       .model_flops = 13'000,
                       .recompute_fwd_factor = 1,
                       .forward_seconds = 1e-3,
                       .backward_seconds = 2e-3,
                       .step_seconds = 5e-4,
                       .iteration_seconds = 1e-2,
                       .micro_batches = 2};
  const std::string text = flops_report(&step, small_profile(), {});
  EXPECT_THAT(text, AllOf(HasSubstr("flops profile of step 2"), ContainsRegex("world size: +8\n"),
                          ContainsRegex("data parallel size: +4\n"), ContainsRegex("model parallel size: +2\n"),
                          ContainsRegex("params of model: +2.20 K\n"), ContainsRegex("fwd MACs per GPU: +3.00 KMACs\n"),
                          ContainsRegex("fwd flops of model .*: +13.00 K\n")));
  // 6500 / 1 ms; (13000 + 500) / 2 ms; (2 + 1) * 6500 / 2 ms; 20000 / 3 ms; 2 * 20000 / 10 ms.
  EXPECT_THAT(text, AllOf(ContainsRegex("fwd FLOPS per GPU = .*: +6.50 MFLOPS\n"),
                          ContainsRegex("bwd FLOPS per GPU = .*: +6.75 MFLOPS\n"),
                          ContainsRegex("as DeepSpeed assumes them.*: +9.75 MFLOPS\n"),
                          ContainsRegex("fwd.bwd FLOPS per GPU: +6.67 MFLOPS\n"),
                          ContainsRegex("\nFLOPS per GPU = all .*: +4.00 MFLOPS\n")));
  EXPECT_THAT(text, ContainsRegex("samples/second: +2400.00\n"));  // 3 * 2 * 4 / 10 ms
  EXPECT_THAT(text, HasSubstr("not counted, for there is no rule: mine::conv\n"));
}

TEST(FlopsReport, APipelineHasOneTimeForBoth) {
  const StepFlops step{.step = 1, .backward_seconds = 2e-3, .iteration_seconds = 1e-2};
  const std::string text = flops_report(&step, small_profile(), {});
  EXPECT_THAT(text, AllOf(ContainsRegex("fwd and bwd latency of the schedule: +2.00 ms\n"),
                          Not(HasSubstr("fwd FLOPS per GPU"))));
}

TEST(FlopsReport, TypesOfModulesAreRankedByDepth) {
  const std::string all = flops_report(nullptr, small_profile(), {.modules = {.top_modules = 2, .detailed = false}});
  EXPECT_THAT(all,
              AllOf(HasSubstr("depth 0:\n    params: Net 1.10 K\n"),
                    HasSubstr("depth 1:\n    params: ModuleList 1.00 K, Linear 100\n    MACs: ModuleList 2.50 K, "),
                    HasSubstr("depth 2:\n    params: Block 1.00 K\n    MACs: Block 2.50 K\n    fwd latency: Block "
                              "1.50 ms\n"),
                    Not(HasSubstr("each module"))));
  const std::string one = flops_report(nullptr, small_profile(), {.modules = {.module_depth = 1}});
  EXPECT_THAT(
      one, AllOf(HasSubstr("params: ModuleList 1.00 K\n"), Not(HasSubstr("Linear 100")), Not(HasSubstr("depth 2:"))));
}

TEST(FlopsReport, EachModuleInItsPlace) {
  const std::string text = flops_report(nullptr, small_profile(), {});
  EXPECT_THAT(text,
              HasSubstr("\nmodel (Net): 1.10 K, 100.00%, 3.00 KMACs, 100.00%, 13.00 K, 2.00 ms, 100.00%, 3.25 MFLOPS\n"
                        "  h (ModuleList): 1.00 K, 90.91%, 2.50 KMACs, 83.33%, 0, 1.50 ms, 75.00%, 3.40 MFLOPS\n"
                        "    0 (Block): 500, 45.45%, 1.50 KMACs, 50.00%"));
  const std::string device = flops_report(nullptr, small_profile(), {.host_times = false});
  EXPECT_THAT(device, AllOf(HasSubstr("model (Net): 1.10 K, 100.00%, 3.00 KMACs, 100.00%, 13.00 K\n"),
                            HasSubstr("latencies of modules are not measured on a device")));
}

}  // namespace
}  // namespace ds::profiling
