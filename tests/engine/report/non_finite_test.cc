// A step whose gradient is infinite or NaN: what becomes of it, and what it says of itself.
#include "engine/report/non_finite.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/check.h"
#include "engine/report/batch_notes.h"
#include "optim/shard_optimizer.h"
#include "tests/engine/offloaded/offload_run.h"
#include "tests/engine/small_run.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using test::run_ranks;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

ordered_json with_precision(ordered_json config, const std::string& precision) {
  if (precision == "bf16") config["bf16"] = {{"enabled", true}};
  if (precision == "fp16") config["fp16"] = {{"enabled", true}, {"loss_scale", 128}};
  return config;
}

// Adds nothing to the loss and, where it is `bad`, NaN to the gradient of norm.bias alone: 0 times the slope of a
// square root at 0. At stage 3 all ranks use the parameter.
at::Tensor masked_root(SmallNet& model, bool bad) {
  return (torch::sqrt(model->norm->bias * 0 + (bad ? 0.0 : 1.0)) * 0).sum();
}

enum class Poison { kLoss, kGradient };

// One optimizer step; `bad`: the last rank's last micro-batch is poisoned.
void one_bad_step(Engine& engine, SmallNet& model, int64_t first, bool bad, Poison poison) {
  for (int64_t i = 0; i < engine.gradient_accumulation_steps(); ++i) {
    const bool here =
        bad && engine.global_rank() == engine.world_size() - 1 && i + 1 == engine.gradient_accumulation_steps();
    const at::Tensor loss = model->loss(sample(first + i, engine.global_rank()));
    engine.backward(poison == Poison::kLoss ? loss * (here ? kNan : 1.0) : loss + masked_root(model, here));
    engine.step();
  }
}

// What the call says, which must fail.
template <class Call>
std::string bad_step_error(const Call& call) {
  try {
    call();
  } catch (const NonFiniteError& error) {
    return error.what();
  }
  ADD_FAILURE() << "expected a NonFiniteError";
  return {};
}

// Of all that an update changes.
State whole_state(Engine& engine) {
  State state = copy_of(engine.fp32_state_dict());
  for (const auto& [name, tensor] : engine.module_state_dict()) state["module." + name] = tensor.clone();
  if (!engine.optimizer()) return state;
  for (int64_t slice = 0; slice < engine.optimizer()->slice_count(); ++slice) {
    for (const auto& [name, tensor] : engine.optimizer()->states(slice)) {
      if (tensor.storage().nbytes() > 0) state[cat(slice, ".", name)] = tensor.clone();  // else it is in a file
    }
  }
  return state;
}

void expect_equal_bits(const State& found, const State& wanted) {
  ASSERT_EQ(found.size(), wanted.size());
  for (const auto& [name, tensor] : wanted) EXPECT_TRUE(at::equal(found.at(name), tensor)) << name;
}

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

// --- what else it says -----------------------------------------------------------------------------------------------

TEST(NonFiniteReport, AStepThatIsAppliedWarnsLessAndLessOften) {
  for (const bool half : {true, false}) {
    ordered_json config = small_config(1, 1);
    config["locate_non_finite"] = true;
    if (half) config["bf16"] = {{"enabled", true}, {"check_grad_overflow", false}};
    if (!half) config["non_finite_gradients"] = "continue";
    ::testing::internal::CaptureStderr();
    ::testing::internal::CaptureStdout();
    run_ranks(2, [&](comm::Communicator& communicator) {
      SmallNet model;
      const auto engine = start(model.ptr(), config, communicator).engine;
      for (int64_t step = 0; step < 5; ++step) one_bad_step(*engine, model, step, step == 0, Poison::kLoss);
      EXPECT_TRUE(engine->was_step_applied());
      EXPECT_EQ(engine->global_steps(), 5);
    });
    const std::string log = ::testing::internal::GetCapturedStdout() + ::testing::internal::GetCapturedStderr();
    EXPECT_THAT(log, AllOf(HasSubstr("step 1: the gradient is not finite: first in parameter first.weight, element 0"),
                           HasSubstr("rank 1's loss of micro-batch 0 is nan; the first that rank 1's autograd made"),
                           HasSubstr(half ? "applied all the same, because bf16.check_grad_overflow is false"
                                          : "applied all the same, because non_finite_gradients is \"continue\"")));
    EXPECT_THAT(log, AllOf(HasSubstr("step 2: "), HasSubstr("(4 steps in a row)"), Not(HasSubstr("step 3: "))));
  }
}

// A parameter of 64 elements whose gradient is what the test wants.
struct Slope : torch::nn::Module {
  Slope() { weight = register_parameter("weight", torch::zeros({64})); }
  at::Tensor loss(double slope) const { return (weight * slope).sum(); }
  at::Tensor weight;
};

TEST(NonFiniteReport, SumsThatOverflowAreToldFromBadGradients) {
  run_ranks(2, [&](comm::Communicator& communicator) {
    ordered_json config = small_config(0, 1);
    config["gradient_allreduce_op"] = "sum";
    config["locate_non_finite"] = true;
    const auto model = std::make_shared<Slope>();
    const auto engine = start(model, config, communicator).engine;
    engine->backward(model->loss(-3e38));
    EXPECT_THAT(bad_step_error([&] { engine->step(); }),
                AllOf(HasSubstr("element 0, which is -inf; all losses are finite; what autograd made on each rank is "
                                "finite, so it overflowed when it was added or reduced")));
    engine->backward(model->loss(1e38));
    EXPECT_THAT(bad_step_error([&] { engine->step(); }),
                HasSubstr("its norm is inf although all its elements are finite"));
    engine->backward(model->loss(1));
    engine->step();
    EXPECT_TRUE(engine->was_step_applied());
  });
}

TEST(NonFiniteReport, TheFirstOfSeveralMicroBatchesIsNamed) {
  run_ranks(2, [&](comm::Communicator& communicator) {
    ordered_json config = small_config(2, 4);
    config["locate_non_finite"] = true;
    SmallNet model;
    const auto engine = start(model.ptr(), config, communicator).engine;
    const int rank = communicator.rank();
    const auto step = [&] {
      for (int64_t micro = 0; micro < 4; ++micro) {
        engine->name_batch(cat("text of rank ", rank, " at ", 10 * micro));
        const bool bad = micro >= 2 - rank && micro < 3;  // rank 0: 2, rank 1: 1 and 2
        engine->backward(model->loss(sample(micro, rank)) * (bad ? kNan : 1.0));
        engine->step();
      }
    };
    EXPECT_THAT(bad_step_error(step),
                AllOf(HasSubstr("rank 0's loss of micro-batch 2 (text of rank 0 at 20) is nan; rank 1's loss of "
                                "micro-batch 1 (text of rank 1 at 10) is nan (1 more after it)"),
                      HasSubstr("; the first that rank 1's autograd made is that of parameter last."),
                      HasSubstr("in micro-batch 1; the first that rank 0's autograd made")));
    // What is known of the accumulation went with it.
    engine->backward(model->loss(sample(0, rank)) * kNan);
    engine->zero_grad();
    for (int64_t micro = 0; micro < 4; ++micro) {
      engine->backward(model->loss(sample(micro, rank)) + masked_root(model, micro == 3));
      if (micro < 3) engine->step();
    }
    EXPECT_THAT(bad_step_error([&] { engine->step(); }),
                AllOf(HasSubstr("first in parameter norm.bias"), HasSubstr("all losses are finite"),
                      HasSubstr("in micro-batch 3;"), Not(HasSubstr("text of"))));
  });
}

// Sample i is a row of i, and one of NaN.
struct OneBadSample {
  explicit OneBadSample(size_t bad) : bad_(bad) {}
  torch::data::Example<> get(size_t index) const {
    const at::Tensor row = torch::full({6}, static_cast<double>(index), torch::kFloat);
    return {index == bad_ ? row * kNan : row, torch::full({}, static_cast<int64_t>(index))};
  }
  size_t size() const { return 24; }

 private:
  size_t bad_;
};

std::string numbers_in(const at::Tensor& target) {
  std::string text = "samples ";
  for (int64_t i = 0; i < target.numel(); ++i) text += cat(i == 0 ? "" : ", ", target[i].item<int64_t>());
  return text + " of the training data";
}

TEST(NonFiniteReport, SamplesOfTheEnginesLoaderAreNamed) {
  std::vector<std::string> errors(2);
  std::string wanted;
  run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const Initialized parts = initialize({.model = model.ptr(),
                                          .config = small_config(1, 3),
                                          .training_data = OneBadSample(13),
                                          .communicator = borrowed(communicator)});
    Engine& engine = *parts.engine;
    const int rank = communicator.rank();
    errors[static_cast<size_t>(rank)] = bad_step_error([&] {
      int64_t micro = 0;
      for (Batch& batch : *parts.loader) {
        const bool bad = (batch.target == 13).any().item<bool>();
        if (bad) wanted = cat("rank ", rank, "'s loss of micro-batch ", micro, " (", numbers_in(batch.target), ") is ");
        engine.backward(model->loss(batch.data));
        engine.step();
        ++micro;
      }
    });
  });
  EXPECT_EQ(errors[0], errors[1]);
  ASSERT_NE(wanted, "");
  EXPECT_THAT(errors[0], HasSubstr(wanted));
}

TEST(BatchNotes, ABatchIsNamedWhereItIsKnown) {
  DataLoader loader(OneBadSample(13), {.micro_batch_size = 2, .shuffle = false});
  auto next = loader.begin();
  BatchNotes notes;
  notes.begin(0, &loader);
  EXPECT_EQ(notes.name_of(0), "samples 0, 1 of the training data");
  notes.begin(0, &loader);  // a second loss of it
  notes.begin(1, &loader);  // data of the program's own
  EXPECT_EQ(notes.name_of(0), "samples 0, 1 of the training data");
  EXPECT_EQ(notes.name_of(1), "");
  notes.name_next("mine");
  ++next;
  notes.begin(2, &loader);
  EXPECT_EQ(notes.name_of(2), "mine");
  ++next;
  ++next;
  notes.begin(3, &loader);  // one of two
  EXPECT_EQ(notes.name_of(3), "");
  ++next;
  notes.forget(/*dropped=*/true);
  ++next;
  notes.begin(0, &loader);  // the first of the two was given up
  EXPECT_EQ(notes.name_of(0), "samples 10, 11 of the training data");
  EXPECT_EQ(notes.name_of(2), "");
}

TEST(NonFiniteText, ManyRanksAreCounted) {
  std::vector<NonFiniteFacts> ranks(9);
  for (size_t rank = 1; rank < 8; ++rank) ranks[rank].loss = {static_cast<int64_t>(rank), "", "inf", 0};
  ranks[2].element = {0, 5, 3, "b", "inf"};
  ranks[6].element = {0, 4, 9, "a", "-inf"};
  const std::string text = describe_non_finite({.norm = kNan}, ranks);
  EXPECT_EQ(
      text,
      "the gradient is not finite: first in parameter a, element 9, which is -inf; rank 1's loss of micro-batch 1 "
      "is inf; rank 2's loss of micro-batch 2 is inf; rank 3's loss of micro-batch 3 is inf; rank 4's loss of "
      "micro-batch 4 is inf; likewise on 3 more ranks");
}

TEST(NonFiniteText, TheRankOfAPipelineWhoseBackwardComesFirstIsNamedFirst) {
  std::vector<NonFiniteFacts> ranks(3);
  ranks[0].local = {1, "", "a", 2};
  ranks[1].local = {1, "x", "b", 1};
  ranks[2].local = {-1, "", "c", 0};
  EXPECT_THAT(describe_non_finite({.norm = kNan, .located = true}, ranks),
              HasSubstr("rank 2's autograd made is that of parameter c; the first that rank 1's autograd made is that "
                        "of parameter b in micro-batch 1 (x); the first that rank 0's autograd made"));
}

TEST(NonFiniteText, FactsGoThroughTextEvenWhereNamesAreNoUtf8) {
  NonFiniteFacts facts;
  EXPECT_FALSE(non_finite_facts(to_text(facts)).element);
  facts.element = {2, 5, 1234567890123, "h.3.\"mlp\".weight", "nan"};
  facts.loss = {3, "file \xff\xfe, line 7", "-inf", 2};
  facts.local = {-1, "", "w", 1};
  const NonFiniteFacts read = non_finite_facts(to_text(facts));
  EXPECT_EQ(read.element->name, facts.element->name);
  EXPECT_EQ(read.element->offset, facts.element->offset);
  EXPECT_EQ(read.element->stage, 2);
  EXPECT_THAT(read.loss->batch, AllOf(HasSubstr("file "), HasSubstr(", line 7")));
  EXPECT_EQ(read.loss->others, 2);
  EXPECT_EQ(read.local->micro_batch, -1);
  EXPECT_EQ(read.local->parameter, "w");
  EXPECT_EQ(name_of_non_finite(-kNan), "nan");
}

}  // namespace
}  // namespace ds::engine
