// The plan: what follows from a config, and what it says.
#include "config/plan/plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/check.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::ThrowsMessage;

Plan plan_of(ordered_json config, int64_t ranks = 4, std::optional<int64_t> parameters = std::nullopt) {
  config["train_micro_batch_size_per_gpu"] = 2;
  return make_plan(config::parse(config, {.dp_world_size = ranks}), {.world_size = ranks, .dp = ranks},
                   {.parameters = parameters});
}

TEST(Plan, DefaultsAreFloat32StageZero) {
  const Plan plan = plan_of(ordered_json::object());
  EXPECT_EQ(plan.gradient_policy, zero::ReductionPolicy::kAllReduce);
  EXPECT_FALSE(plan.partition_optimizer);
  EXPECT_TRUE(plan.overlap_reduction);
  EXPECT_TRUE(plan.average_gradients);
  EXPECT_EQ(plan.model_dtype, DType::kFloat32);
  EXPECT_FALSE(plan.separate_master);
  EXPECT_EQ(plan.non_finite, config::NonFiniteGradients::kError);
  EXPECT_EQ(plan.loss_scaling, LossScaling::kNone);
}

TEST(Plan, SaysHowGradientsAreAveraged) {
  EXPECT_THAT(to_table(plan_of({{"prescale_gradients", true}})), HasSubstr("divided by the ranks before"));
  EXPECT_THAT(to_table(plan_of({{"gradient_predivide_factor", 2.0}})), HasSubstr("divided by 2 before"));
  EXPECT_THAT(to_table(plan_of(ordered_json::object())), Not(HasSubstr("averaging")));
  const std::string sum = to_table(plan_of({{"gradient_allreduce_op", "sum"}, {"gradient_predivide_factor", 2.0}}));
  EXPECT_THAT(sum, AllOf(HasSubstr("gradient_predivide_factor"), HasSubstr("sum divides by nothing")));
}

TEST(Plan, SaysWhichScheduleSetsTheRates) {
  const auto table = [](const std::string& given, bool in_config) {
    ordered_json config = {{"train_micro_batch_size_per_gpu", 2}, {"optimizer", {{"type", "Adam"}}}};
    if (in_config) config["scheduler"] = {{"type", "WarmupLR"}};
    return to_table(
        make_plan(config::parse(config, {.dp_world_size = 2}), {.world_size = 2, .dp = 2}, {.given_schedule = given}));
  };
  EXPECT_THAT(table("", false), HasSubstr("constant"));
  EXPECT_THAT(table("", true), HasSubstr("scheduler.type: WarmupLR"));
  EXPECT_THAT(table(".lr_scheduler", false), AllOf(HasSubstr("a function of the program"),
                                                   HasSubstr("initialize: .lr_scheduler"), Not(HasSubstr("constant"))));
  EXPECT_THAT(table(".lr_scheduler", true), HasSubstr("in place of the config's"));
  EXPECT_THAT(table(".torch_scheduler", false), AllOf(HasSubstr("torch's"), HasSubstr("initialize: .torch_scheduler")));
}

// Sums of every layer go along it.
TEST(Plan, SaysWhetherATensorAxisLiesInsideAHost) {
  const auto plan = [](std::optional<bool> inside) {
    const ordered_json config = {{"train_micro_batch_size_per_gpu", 2},
                                 {"tensor_parallel", {{"autotp_size", 2}}},
                                 {"checkpoint", {{"use_node_local_storage", true}}}};  // wherever they lie
    return make_plan(config::parse(config, {.world_size = 4}), {.world_size = 4, .dp = 2, .tensor = 2},
                     {.tensor_inside_host = inside});
  };
  EXPECT_THAT(to_table(plan(true)), HasSubstr("each axis lies inside a host"));
  EXPECT_THAT(to_table(plan(std::nullopt)), HasSubstr("where hosts have a multiple of 2 ranks"));
  EXPECT_TRUE(plan(true).warnings.empty());
  EXPECT_THAT(to_table(plan(false)), HasSubstr("axes lie across hosts"));
  EXPECT_THAT(plan(false).warnings, ElementsAre(AllOf(HasSubstr("tensor_parallel.autotp_size: 2"),
                                                      HasSubstr("a size that divides the ranks of a host"))));
}

// Where the program's ranks are known, with their names.
TEST(Plan, NamesTheRanksBetweenWhichATensorAxisLeavesAHost) {
  const ordered_json config = {{"train_micro_batch_size_per_gpu", 2}, {"tensor_parallel", {{"autotp_size", 2}}}};
  const Plan plan = make_plan(config::parse(config, {.world_size = 4}), {.world_size = 4, .dp = 2, .tensor = 2},
                              {.tensor_inside_host = false, .tensor_leaves_host = "ranks 2 (host a) and 3 (host b)"});
  EXPECT_THAT(plan.warnings, ElementsAre(HasSubstr("are on several hosts (ranks 2 (host a) and 3 (host b)), and")));
}

TEST(Plan, SaysInWhichOrderTheAxesLie) {
  const auto table = [](const ordered_json& changes, const Topology& topology) {
    ordered_json config = {{"train_micro_batch_size_per_gpu", 2}};
    config.update(changes);
    return to_table(make_plan(config::parse(config, {.world_size = topology.world_size}), topology));
  };
  EXPECT_THAT(table({{"tensor_parallel", {{"autotp_size", 2}}}}, {.world_size = 8, .dp = 4, .tensor = 2}),
              HasSubstr("data 4 x tensor 2, the last innermost: ranks 0 to 6 by 2 train the same parameters on other "
                        "batches, 0 and 1 have parts of the same layers"));
  EXPECT_THAT(table(ordered_json::object(), {.world_size = 8, .dp = 8}), Not(HasSubstr("innermost")));
}

TEST(Plan, KeysOfAnOffloadThatIsNone) {
  const auto with = [](const ordered_json& keys, int stage) {
    return ordered_json{{"zero_optimization", {{"stage", stage}, {"offload_optimizer", keys}}}};
  };
  EXPECT_THAT(
      [&] {
        plan_of(with({{"delayed_update", true}}, 2));
      },
      ThrowsMessage<ConfigError>(AllOf(HasSubstr("delayed_update"), HasSubstr("set the device"))));
  EXPECT_THAT(to_table(plan_of(with({{"ratio", 0.5}, {"pipeline_read", true}}, 2))),
              AllOf(HasSubstr("ratio"), HasSubstr("pipeline_read"), HasSubstr("the optimizer is not offloaded")));
}

TEST(Plan, LeafModulesHaveNoEffectAndTheTableSaysWhatDoesTheSame) {
  const auto with = [](int stage) {
    return ordered_json{{"zero_optimization", {{"stage", stage}, {"leaf_module", {{"names", "experts"}}}}}};
  };
  EXPECT_THAT(to_table(plan_of(with(3))),
              AllOf(HasSubstr("leaf_module"), HasSubstr("no effect"), HasSubstr("engine->gathered_parameters()")));
  EXPECT_THAT(to_table(plan_of(with(2))), AllOf(HasSubstr("leaf_module"), HasSubstr("whole below stage 3")));
  EXPECT_THAT(to_table(plan_of({{"zero_optimization", {{"stage", 3}}}})), Not(HasSubstr("leaf_module")));
}

TEST(Plan, ComparedReplicasHaveARowWhereTheFileHasTheKey) {
  const auto row_of = [](const ordered_json& config) {
    for (const PlanRow& row : plan_of(config).rows) {
      if (row.what == "replicas") return row.choice;
    }
    return std::string();
  };
  EXPECT_EQ(row_of({{"check_replicas", 50}}), "compared after every 50 steps");
  EXPECT_EQ(row_of({{"check_replicas", 0}}), "not compared");
  EXPECT_EQ(row_of(ordered_json::object()), "");
}

TEST(Plan, WhatIsNotFiniteIsAnErrorUnlessSomethingElseIsSaid) {
  using enum config::NonFiniteGradients;
  const ordered_json no_norm = {{"gradient_clipping", 0.0},
                                {"zero_optimization", {{"stage", 1}, {"compute_grad_norm", false}}}};
  const auto with = [](ordered_json config, const ordered_json& more) {
    config.update(more);
    return config;
  };
  EXPECT_EQ(plan_of({{"bf16", {{"enabled", true}}}}).non_finite, kSkip);
  EXPECT_EQ(plan_of({{"bf16", {{"enabled", true}, {"check_grad_overflow", false}}}}).non_finite, kContinue);
  EXPECT_EQ(plan_of({{"bf16", {{"enabled", true}}}, {"non_finite_gradients", "error"}}).non_finite, kError);
  EXPECT_EQ(plan_of({{"torch_autocast", {{"enabled", true}}}}).non_finite, kError);
  EXPECT_EQ(plan_of({{"non_finite_gradients", "skip"}}).non_finite, kSkip);
  EXPECT_EQ(plan_of({{"non_finite_gradients", "auto"}}).non_finite, kError);
  EXPECT_EQ(plan_of(no_norm).non_finite, kContinue);
  EXPECT_FALSE(plan_of(no_norm).compute_grad_norm);
  EXPECT_FALSE(plan_of(with(no_norm, {{"non_finite_gradients", "continue"}})).compute_grad_norm);
  EXPECT_TRUE(plan_of(with(no_norm, {{"fp16", {{"enabled", true}}}})).compute_grad_norm);
  EXPECT_TRUE(plan_of({{"locate_non_finite", true}}).locate_non_finite);
  for (const char* policy : {"skip", "error"}) {
    EXPECT_THAT(
        [&] {
          plan_of(with(no_norm, {{"non_finite_gradients", policy}}));
        },
        ThrowsMessage<ConfigError>(AllOf(HasSubstr(policy), HasSubstr("compute_grad_norm"))));
  }
  EXPECT_THAT(
      [&] {
        plan_of(with(no_norm, {{"locate_non_finite", true}}));
      },
      ThrowsMessage<ConfigError>(HasSubstr("compute_grad_norm")));
  for (const char* policy : {"continue", "error"}) {
    EXPECT_THAT(
        [&] {
          plan_of({{"fp16", {{"enabled", true}}}, {"non_finite_gradients", policy}});
        },
        ThrowsMessage<ConfigError>(AllOf(HasSubstr(policy), HasSubstr("dynamic loss scale"))));
    plan_of({{"fp16", {{"enabled", true}, {"loss_scale", 8}}}, {"non_finite_gradients", policy}});
  }
}

TEST(Plan, StagesArePoliciesOnBuckets) {
  EXPECT_EQ(plan_of({{"zero_optimization", {{"stage", 1}}}}).gradient_policy,
            zero::ReductionPolicy::kReduceScatterAtBoundary);
  const Plan two = plan_of({{"zero_optimization", {{"stage", 2}, {"allgather_bucket_size", 1000}}}});
  EXPECT_EQ(two.gradient_policy, zero::ReductionPolicy::kReduceScatterEveryBackward);
  EXPECT_TRUE(two.partition_optimizer);
  EXPECT_EQ(two.bucket_elements, 1000);
  EXPECT_FALSE(plan_of({{"zero_optimization", {{"stage", 2}, {"overlap_comm", false}}}}).overlap_reduction);
}

TEST(Plan, PrecisionDecidesMasterWireAndSkipping) {
  const Plan half = plan_of({{"fp16", {{"enabled", true}}}});
  EXPECT_TRUE(half.separate_master);
  EXPECT_EQ(half.non_finite, config::NonFiniteGradients::kSkip);
  EXPECT_EQ(half.loss_scaling, LossScaling::kDynamic);
  EXPECT_EQ(half.communication_dtype, DType::kFloat16);
  const Plan fixed_scale = plan_of({{"fp16", {{"enabled", true}, {"loss_scale", 128}}}});
  EXPECT_EQ(fixed_scale.loss_scaling, LossScaling::kStatic);
  const Plan brain = plan_of({{"bf16", {{"enabled", true}}},
                              {"data_types", {{"grad_accum_dtype", "fp32"}}},
                              {"communication_data_type", "fp32"}});
  EXPECT_EQ(brain.gradient_dtype, DType::kFloat32);
  EXPECT_EQ(brain.communication_dtype, DType::kFloat32);
  EXPECT_EQ(brain.loss_scaling, LossScaling::kNone);
  EXPECT_EQ(plan_of({{"torch_autocast", {{"enabled", true}}}}).autocast, DType::kBFloat16);
}

TEST(Plan, TheTableGivesChoiceAndReason) {
  const std::string table = to_table(plan_of({{"zero_optimization", {{"stage", 2}, {"round_robin_gradients", true}}},
                                              {"optimizer", {{"type", "Adam"}, {"params", {{"lr", 0.5}}}}}},
                                             2, 1 << 20));
  EXPECT_THAT(table, HasSubstr("reduce-scatter in every micro-batch"));
  EXPECT_THAT(table, HasSubstr("zero_optimization.stage: 2"));
  EXPECT_THAT(table, HasSubstr("AdamW lr 0.5, each rank 1/2 of it"));
  EXPECT_THAT(table, HasSubstr("gradient_clipping: 1 (default)"));
  EXPECT_THAT(table, HasSubstr("round_robin_gradients"));
  EXPECT_THAT(table, HasSubstr("MiB per rank"));
}

TEST(Plan, PredictsWhatTheZeroPaperSays) {
  // 16-bit Adam, Psi elements on N ranks: parameters 2, gradients 2, master and states 12 bytes an element (section 3
  // of arXiv 1910.02054); stage 1 divides the 12 by N.
  const int64_t psi = 1 << 24;
  const auto bytes = [&](int stage) {
    return plan_of({{"fp16", {{"enabled", true}}},
                    {"zero_optimization", {{"stage", stage}}},
                    {"optimizer", {{"type", "Adam"}}}},
                   4, psi)
        .bytes.value();
  };
  EXPECT_EQ(bytes(0).total(), 16 * psi);
  EXPECT_EQ(bytes(1).total(), 4 * psi + 12 * psi / 4);
  EXPECT_EQ(bytes(2).parameters, 2 * psi);
  EXPECT_EQ(bytes(2).master + bytes(2).optimizer, 12 * psi / 4);
  // The own slices, and the buckets that are filled and on their way: three of eight.
  EXPECT_EQ(bytes(2).gradients, 2 * psi / 4 + 2 * psi * 3 / 8);
}

TEST(Plan, StageThreeGathersWithinItsLimits) {
  const Plan plan = plan_of({{"zero_optimization",
                              {{"stage", 3},
                               {"stage3_max_live_parameters", 1000},
                               {"stage3_max_reuse_distance", 70},
                               {"stage3_prefetch_bucket_size", 50},
                               {"stage3_param_persistence_threshold", 9},
                               {"stage3_model_persistence_threshold", 400}}}});
  EXPECT_EQ(plan.gather, (zero::GatherLimits{.max_live = 1000, .max_reuse_distance = 70, .prefetch = 50}));
  EXPECT_EQ(plan.persistent_numel, 9);
  EXPECT_EQ(plan.persistent_total, 100);  // DeepSpeed divides it by the ranks
  EXPECT_EQ(plan.bucket_elements, 500);   // one in use, one on its way
  EXPECT_TRUE(plan.partition_optimizer);
  const Plan sequential = plan_of({{"zero_optimization", {{"stage", 3}, {"stage3_allgather_sequential", true}}}});
  EXPECT_EQ(sequential.bucket_elements, 1);
  EXPECT_EQ(sequential.gather->prefetch, 1);
  EXPECT_FALSE(plan_of({{"zero_optimization", {{"stage", 2}}}}).gather);
  const Plan released = plan_of({{"zero_optimization", {{"stage", 3}, {"stage3_release_always", true}}}});
  EXPECT_EQ(released.gather, (zero::GatherLimits{.max_live = 1, .max_reuse_distance = 0, .prefetch = 0}));
  EXPECT_EQ(released.persistent_numel, 0);
  EXPECT_EQ(released.bucket_elements, 1);
}

TEST(Plan, RefusalsNameBothKeys) {
  EXPECT_THAT(
      [] {
        plan_of({{"gradient_clip_by_value", 1.0}, {"gradient_clipping", 1.0}});
      },
      ThrowsMessage<ConfigError>(AllOf(HasSubstr("gradient_clip_by_value"), HasSubstr("gradient_clipping"))));
  EXPECT_THAT(
      [] {
        plan_of({{"data_parallel_size", 3}});
      },
      ThrowsMessage<ConfigError>(AllOf(HasSubstr("data_parallel_size"), HasSubstr("expected 4"))));
  EXPECT_THAT(
      [] {
        plan_of({{"zero_optimization", {{"stage", 3}, {"zero_hpz_partition_size", 3}}}});
      },
      ThrowsMessage<ConfigError>(HasSubstr("zero_optimization.zero_hpz_partition_size")));
  EXPECT_EQ(plan_of({{"gradient_clip_by_value", 1.0}}).clip_norm, 0.0);  // the default norm gives way
}

}  // namespace
}  // namespace ds::engine
