// One rank alone makes a call or changes a setting: errors name the calls of both sides, or the setting with both
// values. Mistakes that programs make at every stage are in tests/porting/parted_ranks_test.cc.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <vector>

#include "core/check.h"
#include "dsengine/optimizer.h"
#include "tests/model/client_run.h"
#include "tests/model/small_run.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::ThrowsMessage;

void run_pass(Engine& engine, SmallNet& model, int64_t micro_batch) {
  engine.backward(model->loss(sample(micro_batch, engine.global_rank())));
}

// A call of rank 0 alone, and the sentence with which it meets rank 1.
struct LoneCall {
  std::string expected;
  std::vector<int> stages;  // at which it exchanges anything
  std::function<void(Engine& engine, const std::string& folder)> make;
  bool after_backward = false;
};

TEST(OneRankAlone, IsNamedByTheCallThatItIsIn) {
  const std::vector<LoneCall> calls = {
      {.expected = "rank 0 is in load_checkpoint(), rank 1 in backward()",
       .stages = {0, 2},
       .make = [](Engine& engine, const std::string& folder) { engine.load_checkpoint(folder); }},
      {.expected = "rank 0 is in save_16bit_model(), rank 1 in backward()",
       .stages = {0, 2},
       .make = [](Engine& engine, const std::string& folder) { engine.save_16bit_model(folder); }},
      {.expected = "rank 0 is in clip_grad_norm_(), rank 1 in step()",
       .stages = {1, 2},
       .make = [](Engine& engine, const std::string& /*folder*/) { engine.clip_grad_norm_(0.5); },
       .after_backward = true}};
  for (const LoneCall& call : calls) {
    for (const int stage : call.stages) {
      SCOPED_TRACE(cat(call.expected, ", stage ", stage));
      const test::ScratchFolder folder;
      test::run_ranks(2, [&](comm::Communicator& communicator) {
        SmallNet model;
        const auto engine = start(model.ptr(), small_config(stage, 1), communicator).engine;
        engine->save_checkpoint(folder.path().string());
        const auto step = [&] {
          if (call.after_backward) run_pass(*engine, model, 0);
          if (communicator.rank() == 0) call.make(*engine, folder.path().string());
          if (!call.after_backward) run_pass(*engine, model, 0);
          engine->step();
        };
        EXPECT_THAT(step, ThrowsMessage<std::exception>(HasSubstr(call.expected)));
      });
    }
  }
}

// A setting that rank 1 changes before the fifth step, and sets right after it was refused.
struct LoneSetting {
  std::string expected;
  std::function<void(Initialized& parts)> make;
  std::function<void(Initialized& parts)> mend;
  ordered_json config = small_config(1, 1);
};

LoneSetting lone_option(const std::string& name, double optimizers::GroupOptions::*option, double right,
                        const ordered_json& config = small_config(1, 1)) {
  const auto set = [option](double value) {
    return [option, value](Initialized& parts) { parts.optimizer->groups()[0].*option = value; };
  };
  return {.expected = cat(name, " of parameter group 0: ", right, " on rank 0, 0.25 on rank 1"),
          .make = set(0.25),
          .mend = set(right),
          .config = config};
}

State trained_beside(const LoneSetting& setting, bool is_wrong, comm::Communicator& communicator) {
  SmallNet model;
  Initialized parts = start(model.ptr(), setting.config, communicator);
  for (int64_t batch = 0; batch < 6; ++batch) {
    if (batch == 4 && is_wrong) {
      if (communicator.rank() == 1) setting.make(parts);
      run_pass(*parts.engine, model, batch);
      EXPECT_THAT([&] { parts.engine->step(); },
                  ThrowsMessage<UsageError>(AllOf(HasSubstr(setting.expected), HasSubstr("Nothing was applied"))));
      if (communicator.rank() == 1) setting.mend(parts);
    }
    run_pass(*parts.engine, model, batch);
    parts.engine->step();
  }
  return copy_of(parts.engine->fp32_state_dict());
}

TEST(OneRankAlone, SetsNoOptionOfTheConfigsOptimizer) {
  using optimizers::GroupOptions;
  ordered_json momentum = small_config(2, 1);
  momentum["optimizer"] = {{"type", "SGD"}, {"params", {{"lr", 0.02}, {"momentum", 0.5}}}};
  momentum["zero_allow_untested_optimizer"] = true;
  ordered_json warmed_up = small_config(2, 1);
  warmed_up["scheduler"] = {{"type", "WarmupLR"}, {"params", {{"warmup_max_lr", 0.02}, {"warmup_num_steps", 2}}}};
  const std::vector<LoneSetting> settings = {
      lone_option("beta1", &GroupOptions::beta1, 0.9),
      lone_option("beta2", &GroupOptions::beta2, 0.999),
      lone_option("eps", &GroupOptions::eps, 1e-8),
      lone_option("momentum", &GroupOptions::momentum, 0.5, momentum),
      // The rate is the same by then: the place in the schedule is not.
      {.expected = "last_batch_iteration of the lr scheduler: 3 on rank 0, 7 on rank 1",
       .make = [](Initialized& parts) { parts.schedule->load_last_batch_iteration(7); },
       .mend = [](Initialized& parts) { parts.schedule->load_last_batch_iteration(3); },
       .config = warmed_up}};
  for (const LoneSetting& setting : settings) {
    SCOPED_TRACE(setting.expected);
    test::run_ranks(2, [&](comm::Communicator& communicator) {
      EXPECT_EQ(
          largest_difference(trained_beside(setting, true, communicator), trained_beside(setting, false, communicator)),
          0.0);
    });
  }
}

// At stage 0 each rank has all states: a count of updates that one of them changes would part the models.
TEST(OneRankAlone, CountsNoOtherStepsInTheStatesOfTheProgramsOptimizer) {
  test::run_ranks(2, [](comm::Communicator& communicator) {
    SmallNet model;
    const auto optimizer = torch_optimizer("AdamW", model);
    const auto engine = start_client(model, client_config(0), optimizer, communicator).engine;
    train(*engine, model, 1);
    const auto set_count = [&](int64_t count) {
      if (communicator.rank() != 1) return;
      for (auto& entry : optimizer->state()) static_cast<torch::optim::AdamWParamState&>(*entry.second).step(count);
    };
    set_count(100);
    run_pass(*engine, model, 1);
    EXPECT_THAT([&] { engine->step(); },
                ThrowsMessage<UsageError>(
                    AllOf(HasSubstr("steps of all states of parameter group 0: "), HasSubstr("Nothing was applied"))));
    set_count(1);
    run_pass(*engine, model, 1);
    EXPECT_NO_THROW(engine->step());
  });
}

TEST(OneRankAlone, SetsNoOtherLocalValueWhereEachRankHasAllOfAParameter) {
  for (const int stage : {0, 1}) {
    SCOPED_TRACE(stage);
    test::run_ranks(2, [&](comm::Communicator& communicator) {
      SmallNet model;
      const auto engine = start(model.ptr(), small_config(stage, 1), communicator).engine;
      train(*engine, model, 1);
      const at::Tensor parameter = model->last->bias;
      const auto set = [&](double of_rank_1) {
        const at::Tensor local = engine->safe_get_local_fp32_param(parameter);
        engine->safe_set_local_fp32_param(parameter,
                                          torch::full_like(local, communicator.rank() == 1 ? of_rank_1 : 0.25));
      };
      set(0.5);
      run_pass(*engine, model, 1);
      if (stage == 0) {
        EXPECT_THAT([&] { engine->step(); },
                    ThrowsMessage<UsageError>(HasSubstr("safe_set_local_fp32_param(last.bias): values of norm ")));
        set(0.25);
        run_pass(*engine, model, 1);
      }
      EXPECT_NO_THROW(engine->step());
    });
  }
}

// Digests in a sentence are there to be told apart, by four of their digits.
TEST(OneRankAlone, IsToldWithoutLongNumbers) {
  test::run_ranks(2, [](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), small_config(1, 1), communicator).engine;
    train(*engine, model, 1);
    {
      const torch::NoGradGuard no_grad;
      model->last->bias.fill_(0.125 * (1 + communicator.rank()));
    }
    run_pass(*engine, model, 1);
    EXPECT_THAT([&] { engine->step(); },
                ThrowsMessage<UsageError>(AllOf(ContainsRegex("changed last.bias \\(values [0-9a-f]{4}\\)"),
                                                Not(ContainsRegex("[0-9a-f]{8}")))));
  });
}

}  // namespace
}  // namespace ds::engine
