// A step whose gradient is infinite or NaN: what becomes of it, at every stage and beside the other features.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "core/text.h"
#include "tests/engine/report/non_finite_run.h"
#include "tests/model/offloaded/offload_run.h"
#include "tests/model/small_run.h"
#include "tests/support/file_text.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using test::run_ranks;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

// Four good steps, with a bad one in between that ends in `error` on all ranks; returns that and the state in the end.
struct Interrupted {
  State state;
  std::string error;
};
Interrupted train_interrupted(const ordered_json& config, comm::Communicator& communicator, Poison poison,
                              bool interrupts) {
  SmallNet model;
  const auto engine = start(model.ptr(), config, communicator).engine;
  const int64_t accumulation = engine->gradient_accumulation_steps();
  Interrupted run;
  for (int64_t step = 0; step < 4; ++step) {
    if (interrupts && step == 1) {
      const State before = whole_state(*engine);
      run.error = bad_step_error([&] { one_bad_step(*engine, model, 90, true, poison); });
      expect_equal_bits(whole_state(*engine), before);
      EXPECT_FALSE(engine->was_step_applied());
      EXPECT_EQ(engine->get_global_grad_norm(), std::numeric_limits<double>::infinity());
    }
    EXPECT_EQ(engine->global_steps(), step);
    EXPECT_EQ(engine->micro_steps(), step * accumulation);
    EXPECT_EQ(engine->global_samples(), step * engine->train_batch_size());
    one_bad_step(*engine, model, step * accumulation, false, poison);
    EXPECT_TRUE(engine->was_step_applied());
  }
  EXPECT_EQ(engine->skipped_steps(), 0);
  run.state = whole_state(*engine);
  return run;
}

// Runs it with and without the interruption on `world` ranks; returns what all ranks said alike.
std::string expect_nothing_lost(const ordered_json& config, int world, Poison poison) {
  std::vector<std::string> errors(static_cast<size_t>(world));
  run_ranks(world, [&](comm::Communicator& communicator) {
    const Interrupted with = train_interrupted(config, communicator, poison, true);
    const Interrupted without = train_interrupted(config, communicator, poison, false);
    expect_equal_bits(with.state, without.state);
    errors[static_cast<size_t>(communicator.rank())] = with.error;
  });
  for (const std::string& error : errors) EXPECT_EQ(error, errors[0]);
  return errors[0];
}

// --- every stage, precision and number of ranks ----------------------------------------------------------------------

using NonFiniteJob = std::tuple<int, int, std::string>;  // stage, ranks, precision

class NonFinite : public ::testing::TestWithParam<NonFiniteJob> {
 protected:
  int world() const { return std::get<1>(GetParam()); }
  ordered_json config(const std::string& policy) const {
    ordered_json config = with_precision(small_config(std::get<0>(GetParam()), 2), std::get<2>(GetParam()));
    if (!policy.empty()) config["non_finite_gradients"] = policy;
    return config;
  }
};

TEST_P(NonFinite, ABadLossIsAnErrorThatLosesNothing) {
  // The default of float32.
  const std::string error =
      expect_nothing_lost(config(std::get<2>(GetParam()) == "fp32" ? "" : "error"), world(), Poison::kLoss);
  EXPECT_THAT(error, AllOf(HasSubstr("step 2: the gradient is not finite: first in parameter first.weight, element 0, "
                                     "which is nan"),
                           HasSubstr(cat("; rank ", world() - 1, "'s loss of micro-batch 1 is nan")),
                           HasSubstr("Nothing is lost"), Not(HasSubstr("locate_non_finite"))));
}

TEST_P(NonFinite, ABadGradientOfAGoodLossIsFoundWhereItWasMade) {
  ordered_json with = config("error");
  EXPECT_THAT(expect_nothing_lost(with, world(), Poison::kGradient),
              AllOf(HasSubstr("first in parameter norm.bias, element 0, which is nan; all losses are finite"),
                    HasSubstr("\"locate_non_finite\": true")));
  with["locate_non_finite"] = true;
  EXPECT_THAT(expect_nothing_lost(with, world(), Poison::kGradient),
              AllOf(HasSubstr(cat("; all losses are finite; the first that rank ", world() - 1,
                                  "'s autograd made is that of parameter norm.bias in micro-batch 1")),
                    Not(HasSubstr("likewise"))));
}

TEST_P(NonFinite, ASkippedStepChangesNothing) {
  run_ranks(world(), [&](comm::Communicator& communicator) {
    SmallNet model;
    const bool half = std::get<2>(GetParam()) != "fp32";
    const auto engine = start(model.ptr(), config(half ? "" : "skip"), communicator).engine;
    one_bad_step(*engine, model, 0, false, Poison::kLoss);
    const State before = whole_state(*engine);
    one_bad_step(*engine, model, 2, true, Poison::kLoss);
    EXPECT_FALSE(engine->was_step_applied());
    EXPECT_EQ(engine->skipped_steps(), 1);
    EXPECT_EQ(engine->global_steps(), 2);
    expect_equal_bits(whole_state(*engine), before);
    one_bad_step(*engine, model, 4, false, Poison::kLoss);
    EXPECT_TRUE(engine->was_step_applied());
  });
}

INSTANTIATE_TEST_SUITE_P(All, NonFinite,
                         ::testing::Combine(::testing::Values(0, 1, 2, 3), ::testing::Values(1, 3),
                                            ::testing::Values("fp32", "bf16", "fp16")),
                         [](const auto& job) {
                           return cat("Stage", std::get<0>(job.param), "Ranks", std::get<1>(job.param),
                                      std::get<2>(job.param));
                         });

// --- beside the other features ---------------------------------------------------------------------------------------

TEST(NonFiniteBeside, Offload) {
  for (const int stage : {1, 2, 3}) {
    EXPECT_THAT(expect_nothing_lost(with_offload(small_config(stage, 2), on_host()), 2, Poison::kLoss),
                HasSubstr("rank 1's loss of micro-batch 1 is nan"));
  }
  EXPECT_THAT(expect_nothing_lost(with_offload(small_config(3, 2), on_disk(), on_disk()), 2, Poison::kGradient),
              HasSubstr("first in parameter norm.bias"));
}

TEST(NonFiniteBeside, AnUpdateThatStillRunsIsFinished) {
  for (const int stage : {1, 2, 3}) {
    run_ranks(2, [&](comm::Communicator& communicator) {
      const ordered_json config =
          with_offload(small_config(stage, 2), on_host({{"delayed_update", true}, {"delayed_update_start", 1}}));
      const auto state_after = [&](bool bad) {
        SmallNet model;
        const auto engine = start(model.ptr(), config, communicator).engine;
        for (int64_t step = 0; step < 3; ++step) one_bad_step(*engine, model, 2 * step, false, Poison::kLoss);
        if (bad) EXPECT_THROW(one_bad_step(*engine, model, 6, true, Poison::kLoss), NonFiniteError);
        return whole_state(*engine);
      };
      expect_equal_bits(state_after(true), state_after(false));
    });
  }
}

TEST(NonFiniteBeside, UpdatesThatBeganBeforeTheGradientWasJudged) {
  for (const int stage : {1, 2, 3}) {
    for (const char* type : {"AdamW", "SGD"}) {
      ordered_json config = with_offload(small_config(stage, 2), on_host({{"super_offload", true}}));
      config["optimizer"] = {{"type", type}, {"params", {{"lr", 0.02}}}};
      config["zero_allow_untested_optimizer"] = true;
      config["locate_non_finite"] = true;
      EXPECT_THAT(expect_nothing_lost(config, 2, Poison::kGradient),
                  AllOf(HasSubstr("rank 1's autograd made is that of parameter norm.bias in micro-batch 1")));
      run_ranks(2, [&](comm::Communicator& communicator) {
        SmallNet model;
        const auto engine = start(model.ptr(), config, communicator).engine;
        EXPECT_THROW(one_bad_step(*engine, model, 0, true, Poison::kLoss), NonFiniteError);
        EXPECT_EQ(engine->speculation().rolled_back, 1);
        one_bad_step(*engine, model, 2, false, Poison::kLoss);
        EXPECT_EQ(engine->speculation().stood, 1);
      });
    }
  }
}

TEST(NonFiniteBeside, CopiesOfTheModelState) {
  ordered_json config = small_config(3, 2);
  config["zero_optimization"]["mics_shard_size"] = 2;
  EXPECT_THAT(expect_nothing_lost(config, 4, Poison::kLoss),
              AllOf(HasSubstr("first in parameter first.weight, element 0"), HasSubstr("rank 3's loss")));
}

TEST(NonFiniteBeside, CompressedGradientsStayUsable) {
  for (const char* method : {"int8", "sign", "top_k", "power_sgd", "bf16"}) {
    for (const int stage : {0, 2}) {
      run_ranks(2, [&](comm::Communicator& communicator) {
        ordered_json config = small_config(stage, 2);
        config["gradient_compression"] = {{"method", method}};
        SmallNet model;
        const auto engine = start(model.ptr(), config, communicator).engine;
        one_bad_step(*engine, model, 0, false, Poison::kLoss);
        const State before = whole_state(*engine);
        EXPECT_THAT(bad_step_error([&] { one_bad_step(*engine, model, 2, true, Poison::kLoss); }),
                    HasSubstr("rank 1's loss of micro-batch 1 is nan"))
            << method;
        expect_equal_bits(whole_state(*engine), before);
        one_bad_step(*engine, model, 4, false, Poison::kLoss);
        EXPECT_TRUE(std::isfinite(engine->get_global_grad_norm().value())) << method;
      });
    }
  }
}

TEST(NonFiniteBeside, OptimizersThatKeepTheirOwnGradientsSayWhose) {
  ordered_json config = small_config(1, 1);
  config["optimizer"] = {{"type", "OneBitAdam"}, {"params", {{"lr", 0.02}, {"freeze_step", 1}}}};
  run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), config, communicator).engine;
    for (int64_t step = 0; step < 3; ++step) one_bad_step(*engine, model, step, false, Poison::kLoss);
    const State before = whole_state(*engine);
    EXPECT_THAT(bad_step_error([&] { one_bad_step(*engine, model, 3, true, Poison::kGradient); }),
                HasSubstr("first in parameter norm.bias, element 0 of rank 1's own gradient, which is nan"));
    expect_equal_bits(whole_state(*engine), before);
    one_bad_step(*engine, model, 4, false, Poison::kLoss);
    EXPECT_TRUE(engine->was_step_applied());
  });
}

TEST(NonFiniteBeside, AClientOptimizer) {
  run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    ordered_json config = small_config(0, 1);
    config.erase("optimizer");
    const auto sgd = std::make_shared<torch::optim::SGD>(model->parameters(), torch::optim::SGDOptions(0.1));
    const auto engine =
        initialize({.model = model.ptr(), .config = config, .optimizer = sgd, .communicator = borrowed(communicator)})
            .engine;
    const State before = parameters_of(*model);
    EXPECT_THROW(one_bad_step(*engine, model, 0, true, Poison::kLoss), NonFiniteError);
    expect_equal_bits(parameters_of(*model), before);
    one_bad_step(*engine, model, 1, false, Poison::kLoss);
    EXPECT_GT(largest_difference(parameters_of(*model), before), 0.0);
  });
}

// As cross_entropy of targets that are all ignored: NaN, with a gradient of zeros.
TEST(NonFiniteBeside, ALossThatIsNotFiniteWhoseGradientIsIsToldByItsRank) {
  for (const int stage : {0, 3}) {
    SCOPED_TRACE(stage);
    const test::ScratchFolder folder;
    ordered_json config = small_config(stage, 2);
    config["csv_monitor"] = {{"enabled", true}, {"output_path", folder.path().string()}, {"job_name", "run"}};
    ::testing::internal::CaptureStderr();
    run_ranks(2, [&](comm::Communicator& communicator) {
      SmallNet model;
      const auto engine = start(model.ptr(), config, communicator).engine;
      for (int micro_batch = 0; micro_batch < 4; ++micro_batch) {
        const at::Tensor loss = model->loss(sample(micro_batch, communicator.rank()));
        const bool bad = communicator.rank() == 1 && micro_batch == 3;
        engine->name_batch("text " + std::to_string(micro_batch));
        engine->backward(bad ? loss * 0 + kNan : loss);
        engine->step();
      }
      EXPECT_TRUE(engine->was_step_applied());
      EXPECT_FALSE(engine->fp32_state_dict().front().second.isnan().any().item<bool>());
    });
    const std::string text = ::testing::internal::GetCapturedStderr();
    EXPECT_THAT(text,
                HasSubstr("step 2: rank 1's loss of micro-batch 1 (text 3) is nan, and the gradients are finite"));
    EXPECT_THAT(text, ::testing::Not(HasSubstr("rank 0's loss")));
    const std::string losses = test::file_text(folder / "run/Train_Samples_train_loss.csv");
    EXPECT_THAT(losses, ::testing::EndsWith("nan\n")) << "monitors tell it: " << losses;
    EXPECT_EQ(losses.find("nan"), losses.size() - 4) << "of the second step alone";
  }
}

TEST(NonFiniteBeside, WithoutANormNothingIsJudged) {
  run_ranks(2, [&](comm::Communicator& communicator) {
    ordered_json config = small_config(2, 1);
    config["zero_optimization"]["compute_grad_norm"] = false;
    SmallNet model;
    const auto engine = start(model.ptr(), config, communicator).engine;
    one_bad_step(*engine, model, 0, true, Poison::kLoss);
    EXPECT_TRUE(engine->was_step_applied());
    EXPECT_TRUE(engine->fp32_state_dict().front().second.isnan().any().item<bool>());
  });
}

}  // namespace
}  // namespace ds::engine
