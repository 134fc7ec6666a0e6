// Compressed optimizers as a user meets them: precision, masks, groups, what is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "core/check.h"
#include "tests/model/small_run.h"
#include "tests/support/thread_ranks.h"
#include "tests/support/thrown.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using test::run_ranks;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

ordered_json config_of(const std::string& type, int stage = 0, int64_t freeze = 5) {
  ordered_json config = small_config(stage, 1);
  ordered_json params = {{"lr", 0.02}, {"weight_decay", 0.0}};
  params[type == "ZeroOneAdam" ? "var_freeze_step" : "freeze_step"] = freeze;
  if (type == "ZeroOneAdam") {
    params["var_update_scaler"] = 3;
    params["local_step_scaler"] = 6;
    params["local_step_clipper"] = 4;
  }
  config["optimizer"] = {{"type", type}, {"params", params}};
  return config;
}

struct PrecisionJob {
  std::string type;
  int stage;
  std::string precision;
};

std::string name_of_precision(const ::testing::TestParamInfo<PrecisionJob>& info) {
  return cat(info.param.type, "Stage", info.param.stage, info.param.precision);
}

class CompressedPrecision : public ::testing::TestWithParam<PrecisionJob> {};

TEST_P(CompressedPrecision, LearnsAndKeepsTheRanksTogether) {
  const PrecisionJob& job = GetParam();
  // LAMB's averaged coefficient begins at 0 and needs some steps.
  ordered_json config = config_of(job.type, job.stage, job.type == "OneBitLamb" ? 25 : 5);
  if (job.type == "OneBitLamb") config["optimizer"]["params"]["lr"] = 0.08;
  config["gradient_clipping"] = 1.0;
  config[job.precision] = {{"enabled", true}};
  if (job.precision == "fp16") config["fp16"]["initial_scale_power"] = 8;
  constexpr int kWorld = 3;
  std::vector<State> ends(kWorld);
  run_ranks(kWorld, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), config, communicator).engine;
    const double before = model->loss(sample(0, 0)).item<double>();
    ends[static_cast<size_t>(communicator.rank())] = train(*engine, model, 60);
    EXPECT_LT(model->loss(sample(0, 0)).item<double>(), 0.7 * before);
  });
  for (const State& end : ends) EXPECT_EQ(largest_difference(end, ends[0]), 0.0);
}

INSTANTIATE_TEST_SUITE_P(Runs, CompressedPrecision,
                         ::testing::Values(PrecisionJob{"OneBitAdam", 0, "bf16"}, PrecisionJob{"OneBitAdam", 1, "fp16"},
                                           PrecisionJob{"OneBitAdam", 2, "bf16"}, PrecisionJob{"OneBitLamb", 1, "bf16"},
                                           PrecisionJob{"OneBitLamb", 0, "fp16"},
                                           PrecisionJob{"ZeroOneAdam", 0, "bf16"},
                                           PrecisionJob{"ZeroOneAdam", 0, "fp16"}),
                         name_of_precision);

TEST(CompressedTraining, AnOverflowOfOneRankAfterTheFreezeSkipsTheStepOfAll) {
  run_ranks(2, [&](comm::Communicator& communicator) {
    ordered_json config = config_of("OneBitAdam", 1);
    config["fp16"] = {{"enabled", true}, {"initial_scale_power", 8}, {"hysteresis", 1}};
    SmallNet model;
    const auto engine = start(model.ptr(), config, communicator).engine;
    train(*engine, model, 8);
    const State before = copy_of(engine->fp32_state_dict());
    const float poison = communicator.rank() == 1 ? std::numeric_limits<float>::infinity() : 1.0F;
    engine->backward(model->loss(sample(8, communicator.rank())) * poison);
    engine->step();
    EXPECT_FALSE(engine->was_step_applied());
    EXPECT_EQ(largest_difference(copy_of(engine->fp32_state_dict()), before), 0.0);
    engine->backward(model->loss(sample(9, communicator.rank())));
    engine->step();
    EXPECT_TRUE(engine->was_step_applied());
  });
}

TEST(CompressedTraining, SendsOneBitAnElementAfterTheFreeze) {
  run_ranks(2, [&](comm::Communicator& communicator) {
    torch::nn::Linear model(1000, 1000);
    const auto train_step = [&](Engine& engine) {
      engine.backward(model(torch::ones({2, 1000})).pow(2).mean());
      engine.reset_comm_counters();
      engine.step();
      return engine.comm_bytes_sent();
    };
    for (const auto& [stage, share] : std::vector<std::pair<int, double>>{{0, 1.0 / 31}, {1, 0.5 + 1.0 / 31}}) {
      ordered_json config = config_of("OneBitAdam", stage, 2);
      config["zero_optimization"]["overlap_comm"] = false;
      const auto engine = start(model.ptr(), config, communicator).engine;
      for (int step = 0; step < 3; ++step) {  // the first compressed one also gathers the averages of stage 1
        engine->backward(model(torch::ones({2, 1000})).pow(2).mean());
        engine->step();
      }
      const double dense = 2.0 * 4 * 1001000 / 2;
      EXPECT_LT(static_cast<double>(train_step(*engine)), dense * share) << "stage " << stage;
    }
  });
}

// The last three rows of a table that nothing looks up.
struct LookupNetImpl : torch::nn::Module {
  LookupNetImpl() {
    table = register_parameter("table", torch::ones({8, 4}));
    out = register_module("out", torch::nn::Linear(4, 1));
    fill(*this);
  }
  at::Tensor loss(int64_t micro, int rank) {
    const at::Tensor rows = torch::arange(micro % 3, micro % 3 + 3);
    return (out(table.index_select(0, rows)) - 1.0 - 0.1 * rank).pow(2).mean();
  }
  at::Tensor table;
  torch::nn::Linear out{nullptr};
};
TORCH_MODULE(LookupNet);

State train_lookup(const ordered_json& config, const std::vector<ParameterGroup>& groups,
                   comm::Communicator& communicator) {
  LookupNet model;
  const auto engine =
      initialize(
          {.model = model.ptr(), .config = config, .parameter_groups = groups, .communicator = borrowed(communicator)})
          .engine;
  for (int64_t micro = 0; micro < 20; ++micro) {
    engine->backward(model->loss(micro, communicator.rank()));
    engine->step();
  }
  return copy_of(engine->fp32_state_dict());
}

TEST(CompressedTraining, RowsWithoutGradientStayAsTheyAre) {
  for (const std::string type : {"OneBitAdam", "OneBitLamb", "ZeroOneAdam"}) {
    for (const int stage : {0, 1}) {
      if (type == "ZeroOneAdam" && stage > 0) continue;
      run_ranks(2, [&](comm::Communicator& communicator) {
        const LookupNet fresh;
        const State end = train_lookup(config_of(type, stage), {}, communicator);
        const at::Tensor change = (end.at("table") - fresh->table.detach()).abs();
        EXPECT_EQ(change.narrow(0, 5, 3).max().item<double>(), 0.0) << type;
        EXPECT_GT(change.narrow(0, 0, 5).amin().item<double>(), 0.0) << type;
      });
    }
  }
}

// Beside SmallNet's, a bias of zeros that forward does not read.
struct SpareNetImpl : SmallNetImpl {
  SpareNetImpl() { spare = register_parameter("spare", torch::zeros({5})); }
  at::Tensor spare;
};
TORCH_MODULE(SpareNet);

TEST(CompressedTraining, AParameterOfZerosThatNothingUsesStaysZero) {
  for (const std::string type : {"OneBitAdam", "OneBitLamb", "ZeroOneAdam"}) {
    for (const int stage : {0, 1, 2}) {
      if (type == "ZeroOneAdam" && stage > 0) continue;
      ordered_json config = config_of(type, stage);
      config["optimizer"]["params"]["weight_decay"] = 0.1;
      run_ranks(2, [&](comm::Communicator& communicator) {
        SpareNet model;
        const auto engine = start(model.ptr(), config, communicator).engine;
        for (int64_t step = 0; step < 12; ++step) {
          engine->backward(model->loss(sample(step, communicator.rank())));
          engine->step();
        }
        for (const auto& [name, values] : engine->fp32_state_dict()) {
          EXPECT_TRUE(values.isfinite().all().item<bool>()) << type << " stage " << stage << " " << name;
          if (name == "spare") EXPECT_EQ(values.abs().max().item<double>(), 0.0) << type << " stage " << stage;
        }
      });
    }
  }
}

TEST(CompressedTraining, AMaskHoldsTheMomentumOfItsElements) {
  run_ranks(2, [&](comm::Communicator& communicator) {
    ordered_json config = config_of("OneBitAdam", 0);
    config["optimizer"]["params"]["deepspeed_semantics"] = true;  // which holds nothing by itself
    const at::Tensor mask = torch::ones({8, 1});
    mask.narrow(0, 4, 4).zero_();
    ParameterGroup masked;
    masked.parameters = {"table"};
    masked.exp_avg_mask = mask;
    const LookupNet fresh;
    const State end = train_lookup(config, {masked}, communicator);
    const at::Tensor change = (end.at("table") - fresh->table.detach()).abs();
    EXPECT_EQ(change.narrow(0, 5, 3).max().item<double>(), 0.0);
    const State unmasked = train_lookup(config, {}, communicator);
    EXPECT_GT((unmasked.at("table") - fresh->table.detach()).abs().narrow(0, 5, 3).max().item<double>(), 1.0);
  });
}

TEST(CompressedTraining, RanksWithOtherMasksAreRefused) {
  run_ranks(2, [&](comm::Communicator& communicator) {
    ParameterGroup masked;
    masked.parameters = {"table"};
    masked.exp_avg_mask = torch::ones({8, 1});
    masked.exp_avg_mask[communicator.rank()] = 0;
    EXPECT_THROW(train_lookup(config_of("OneBitAdam"), {masked}, communicator), CommError);
  });
}

TEST(CompressedTraining, AGroupThatIsNotFrozenStaysAdamW) {
  run_ranks(2, [&](comm::Communicator& communicator) {
    for (const int stage : {0, 1}) {
      ParameterGroup all;
      all.parameters = {"*"};
      all.non_freeze = true;
      SmallNet model;
      const auto engine = initialize({.model = model.ptr(),
                                      .config = config_of("OneBitAdam", stage),
                                      .parameter_groups = {all},
                                      .communicator = borrowed(communicator)})
                              .engine;
      const State end = train(*engine, model, 20);
      SmallNet dense;
      ordered_json config = small_config(stage, 1);
      config["optimizer"] = {{"type", "AdamW"}, {"params", {{"lr", 0.02}, {"weight_decay", 0.0}}}};
      EXPECT_EQ(largest_difference(train(*start(dense.ptr(), config, communicator).engine, dense, 20), end), 0.0);
    }
  });
}

TEST(CompressedTraining, UntilTheFreezeItIsAdamW) {
  run_ranks(3, [&](comm::Communicator& communicator) {
    SmallNet model;
    const State end = train(*start(model.ptr(), config_of("OneBitAdam", 1, 20), communicator).engine, model, 20);
    ordered_json config = small_config(1, 1);
    config["optimizer"] = {{"type", "AdamW"}, {"params", {{"lr", 0.02}, {"weight_decay", 0.0}}}};
    SmallNet dense;
    EXPECT_EQ(largest_difference(train(*start(dense.ptr(), config, communicator).engine, dense, 20), end), 0.0);
  });
}

TEST(CompressedTraining, TheSumOverRanksIsTheMeanTimesTheirNumber) {
  run_ranks(2, [&](comm::Communicator& communicator) {
    ordered_json config = config_of("OneBitAdam", 1);
    config["gradient_clipping"] = 0.5;  // of the norm of the sum
    SmallNet mean_model;
    const State mean = train(*start(mean_model.ptr(), config, communicator).engine, mean_model, 12);
    config["gradient_allreduce_op"] = "sum";
    config["gradient_clipping"] = 1.0;
    config["optimizer"]["params"]["eps"] = 2e-8;
    SmallNet sum_model;
    const State sum = train(*start(sum_model.ptr(), config, communicator).engine, sum_model, 12);
    EXPECT_LT(largest_difference(mean, sum), 1e-5);
  });
}

std::string refusal_of(const ordered_json& config, const std::vector<ParameterGroup>& groups = {}) {
  std::string message = "none";
  run_ranks(1, [&](comm::Communicator& communicator) {
    SmallNet model;
    message = test::thrown_by(
        [&] {
          initialize({.model = model.ptr(),
                      .config = config,
                      .parameter_groups = groups,
                      .communicator = borrowed(communicator)});
        },
        "none");
  });
  return message;
}

TEST(CompressedTraining, WhatDoesNotGoTogetherIsRefused) {
  EXPECT_THAT(refusal_of(config_of("OneBitAdam", 3)), HasSubstr("OneBitAdam needs zero_optimization.stage 0, 1 or 2"));
  EXPECT_THAT(refusal_of(config_of("ZeroOneAdam", 1)), HasSubstr("ZeroOneAdam needs zero_optimization.stage 0"));
  ordered_json offload = config_of("OneBitAdam", 1);
  offload["zero_optimization"]["offload_optimizer"] = {{"device", "cpu"}};
  EXPECT_THAT(refusal_of(offload), HasSubstr("offload_optimizer"));
  EXPECT_THAT(refusal_of(config_of("OneBitAdam", 0, 0)), HasSubstr("freeze_step: expected at least 1"));
  EXPECT_THAT(refusal_of(config_of("OneBitLamb", 0, 0)), HasSubstr("freeze_step: expected at least 1"));
  EXPECT_THAT(refusal_of(config_of("ZeroOneAdam", 0, 0)), HasSubstr("var_freeze_step: expected at least 1"));
  ParameterGroup group;
  group.parameters = {"first.weight"};
  group.exp_avg_mask = torch::ones({5});
  EXPECT_THAT(refusal_of(config_of("OneBitAdam"), {group}),
              AllOf(HasSubstr("exp_avg_mask"), HasSubstr("first.weight")));
  EXPECT_THAT(refusal_of(small_config(0, 1), {group}), HasSubstr("exp_avg_mask are for OneBitAdam"));
}

}  // namespace
}  // namespace ds::engine
