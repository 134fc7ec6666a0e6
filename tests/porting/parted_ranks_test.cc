// Ranks whose programs take different ways: named at the next step, at every stage.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"
#include "dsengine/optimizer.h"
#include "engine/engine_impl.h"
#include "tests/porting/ported_run.h"

namespace ds::engine {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

class PartedRanks : public ::testing::TestWithParam<int> {};
class PartedReductions : public ::testing::TestWithParam<int> {};
class PartedSettings : public ::testing::TestWithParam<int> {};

class Samples : public torch::data::datasets::Dataset<Samples> {
 public:
  torch::data::Example<> get(size_t index) override {
    return {sample(static_cast<int64_t>(index), 0).select(0, 0), torch::zeros({1})};
  }
  torch::optional<size_t> size() const override { return 64; }
};

// As a program that catches an exception of its own and goes on with the next batch.
TEST_P(PartedRanks, ABatchThatOneRankLeavesOutIsNamedAtTheNextStep) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    auto parts = initialize({.model = model.ptr(),
                             .config = small_config(GetParam(), 1),
                             .training_data = Samples(),
                             .communicator = borrowed(communicator)});
    Engine& engine = *parts.engine;
    int64_t batches = 0;
    const auto run = [&] {
      for (const auto& batch : *parts.loader) {
        if (++batches == 3 && communicator.rank() == 1) continue;
        engine.backward(model->loss(batch.data));
        engine.step();
      }
    };
    EXPECT_THAT(run, ThrowsMessage<UsageError>(AllOf(HasSubstr("different numbers of batches"),
                                                     HasSubstr("rank 0: step 3, batch 3 of its loader"),
                                                     HasSubstr("rank 1: step 3, batch 4 of its loader"))));
  });
}

// With data of its own nothing tells a batch that one rank leaves out from any other, until the others have one more.
TEST_P(PartedRanks, ABatchOfItsOwnThatOneRankLeavesOutIsAnErrorAtTheEnd) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), small_config(GetParam(), 1), communicator).engine;
    const auto run = [&] {
      for (int batch = 0; batch < 4; ++batch) {
        if (batch == 1 && communicator.rank() == 1) continue;
        engine->backward(model->loss(sample(batch, communicator.rank())));
        engine->step();
      }
    };
    if (communicator.rank() == 1) return run();
    EXPECT_THAT(run, ThrowsMessage<std::exception>(AllOf(HasSubstr("rank 1"), HasSubstr(", step 4)"))));
  });
}

// At stage 3 the ranks then wait in two groups for each other, which the flight watch of processes finds.
TEST_P(PartedReductions, ASecondBackwardOfOneRankIsAnErrorOnAll) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), small_config(GetParam(), 1), communicator).engine;
    train(*engine, model, 1);
    const auto step = [&] {
      const int times = 1 + communicator.rank();
      for (int i = 0; i < times; ++i) engine->backward(model->loss(sample(1, communicator.rank())) / times);
      engine->step();
    };
    EXPECT_THAT(step, ThrowsMessage<std::exception>(
                          AllOf(HasSubstr("ranks issued different collectives"), HasSubstr(", step 2)"))));
  });
}

// At stage 3, where the others do not take part in its gathers: no wrong numbers first.
TEST(PartedRanksAtStage3, AForwardOfOneRankAloneThrowsWithTheWayOut) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), small_config(3, 1), communicator).engine;
    train(*engine, model, 1);
    const auto forward = [&] {
      const torch::NoGradGuard no_grad;
      if (communicator.rank() == 0) model->forward(sample(0, 0));
      const torch::AutoGradMode grad(true);
      engine->backward(model->loss(sample(1, communicator.rank())));
      engine->step();
    };
    EXPECT_THAT(forward, ThrowsMessage<std::exception>(AllOf(HasSubstr("ranks issued different collectives"),
                                                             HasSubstr("parameters of bucket"))));
  });
}

nlohmann::ordered_json released_always(bool on) {
  nlohmann::ordered_json config = small_config(3, 1);
  config["zero_optimization"] = {{"stage", 3}, {"stage3_release_always", on}};
  return config;
}

// Episodes of a policy end when they end. A small model does not care: it is whole. One that is released, as a large
// one is, does, in the first forward that not all ranks run.
TEST(PartedRanksAtStage3, RolloutsOfDifferentLengthAreNamedWhereTheModelIsReleased) {
  for (const bool released : {false, true}) {
    test::run_ranks(2, [&](comm::Communicator& communicator) {
      SmallNet model;
      const auto engine = start(model.ptr(), released_always(released), communicator).engine;
      train(*engine, model, 2);
      const auto step = [&] {
        {
          const torch::NoGradGuard no_grad;
          for (int i = 0; i < 2 + 2 * communicator.rank(); ++i) model->forward(sample(i, communicator.rank()));
        }
        engine->backward(model->loss(sample(2, communicator.rank())));
        engine->step();
      };
      if (!released) {
        step();
        return;
      }
      EXPECT_THAT(step, ThrowsMessage<std::exception>(
                            AllOf(HasSubstr("ranks issued different collectives"), HasSubstr("rank 0 all_reduce"),
                                  HasSubstr("'start of backward'"), HasSubstr("rank 1 all_gather"),
                                  HasSubstr("'parameters of bucket"), HasSubstr(", step 3)"),
                                  HasSubstr("in a scope of engine->gathered_parameters"))));
    });
  }
}

TEST(PartedRanksAtStage3, AReleasedModelTrainsAsAnyOther) {
  const PortedRun run;
  expect_same(run_on_engine(run, released_always(true)), run_plainly(run));
}

TEST(PartedRanksAtStage3, InAScopeForwardsMayDiffer) {
  const PortedRun run;
  const PortedResult expected = run_plainly(run);
  const auto rollouts = [](Engine& engine, SmallNet& model) {
    const auto whole = engine.gathered_parameters(model->parameters());
    const torch::NoGradGuard no_grad;
    for (int i = 0; i <= 3 * engine.global_rank(); ++i) model->forward(sample(i, 0));
  };
  expect_same(run_on_engine(run, small_config(3, 1), rollouts), expected);
}

// What the program of one rank has at hand.
struct OfRank {
  SmallNet& model;
  Initialized& parts;
  torch::optim::AdamW* client;  // null: the optimizer is the config's
  double& factor;               // of the schedule
};

// A setting that one rank has otherwise.
struct Mistake {
  std::string name;
  std::string expected;               // of the message, beside the ranks
  std::function<void(OfRank&)> make;  // on rank 1
  std::function<void(OfRank&)> mend;  // on rank 1
  bool by_client = false;             // with an optimizer of the program's
  bool by_schedule = false;           // with a schedule of the program's
  std::function<nlohmann::ordered_json(int stage)> config = [](int stage) { return small_config(stage, 1); };
};

auto& client_options(OfRank& rank) {
  return static_cast<torch::optim::AdamWOptions&>(rank.client->param_groups()[0].options());
}

nlohmann::ordered_json half_config(int stage) {
  nlohmann::ordered_json config = small_config(stage, 1);
  config["fp16"] = {{"enabled", true}, {"initial_scale_power", 4}};
  return config;
}

// Trains 5 steps, before the third of which rank 1 makes the mistake; mended, the step is made again.
State trained_with(const Mistake& mistake, int stage, bool is_wrong, comm::Communicator& communicator) {
  SmallNet model;
  double factor = 1.0;
  InitializeOptions options{
      .model = model.ptr(), .config = mistake.config(stage), .communicator = borrowed(communicator)};
  std::shared_ptr<torch::optim::AdamW> client;
  if (mistake.by_client) {
    client = std::make_shared<torch::optim::AdamW>(model->parameters(), torch::optim::AdamWOptions(0.02));
    options.optimizer = client;
  }
  if (mistake.by_schedule) options.lr_scheduler = [&factor](int64_t /*step*/) { return factor; };
  Initialized parts = initialize(options);
  Engine& engine = *parts.engine;
  OfRank rank{model, parts, client.get(), factor};
  const auto step = [&](int batch) {
    engine.backward(model->loss(sample(batch, communicator.rank())));
    engine.step();
  };
  for (int batch = 0; batch < 5; ++batch) {
    if (batch == 2 && is_wrong) {
      if (communicator.rank() == 1) mistake.make(rank);
      EXPECT_THAT([&] { step(batch); },
                  ThrowsMessage<UsageError>(AllOf(HasSubstr("different settings of the update"),
                                                  HasSubstr(mistake.expected), HasSubstr("Nothing was applied"))));
      EXPECT_EQ(engine.global_steps(), 2);
      EXPECT_EQ(engine.micro_steps(), 2);
      if (communicator.rank() == 1) mistake.mend(rank);
    }
    step(batch);
  }
  return copy_of(engine.fp32_state_dict());
}

std::vector<Mistake> mistakes() {
  using optimizers::GroupOptions;
  const auto group = [](OfRank& rank) -> GroupOptions& { return rank.parts.optimizer->groups()[0]; };
  const auto scaler = [](OfRank& rank) -> optimizers::LossScaler& {
    return *EngineAccess::impl_of(*rank.parts.engine).loss_scaler;
  };
  const auto set_factor = [](OfRank& rank, double factor) {
    rank.factor = factor;
    LrScheduler& schedule = *rank.parts.schedule;
    schedule.load_last_batch_iteration(schedule.last_batch_iteration());
  };
  return {{.name = "the rate",
           .expected = "lr of parameter group 0: 0.02 on rank 0, 0.0001 on rank 1",
           .make = [=](OfRank& rank) { group(rank).lr = 1e-4; },
           .mend = [=](OfRank& rank) { group(rank).lr = 0.02; }},
          {.name = "the last digit of the rate",
           .expected = "lr of parameter group 0: 0.02 on rank 0, 0.020000000000000004 on rank 1",
           .make = [=](OfRank& rank) { group(rank).lr = std::nextafter(0.02, 1.0); },
           .mend = [=](OfRank& rank) { group(rank).lr = 0.02; }},
          {.name = "decay",
           .expected = "weight_decay of parameter group 0: 0.1 on rank 0, 0.5 on rank 1",
           .make = [=](OfRank& rank) { group(rank).weight_decay = 0.5; },
           .mend = [=](OfRank& rank) { group(rank).weight_decay = 0.1; }},
          {.name = "the schedule",
           .expected = "lr of parameter group 0: 0.02 on rank 0, 0.01 on rank 1",
           .make = [=](OfRank& rank) { set_factor(rank, 0.5); },
           .mend = [=](OfRank& rank) { set_factor(rank, 1.0); },
           .by_schedule = true},
          {.name = "the rate of the program's optimizer",
           .expected = "lr of parameter group 0: 0.02 on rank 0, 0.5 on rank 1",
           .make = [](OfRank& rank) { client_options(rank).lr(0.5); },
           .mend = [](OfRank& rank) { client_options(rank).lr(0.02); },
           .by_client = true},
          {.name = "a beta of the program's optimizer",
           .expected = "beta2 of parameter group 0: 0.999 on rank 0, 0.5 on rank 1",
           .make =
               [](OfRank& rank) {
                 client_options(rank).betas({0.9, 0.5});
               },
           .mend =
               [](OfRank& rank) {
                 client_options(rank).betas({0.9, 0.999});
               },
           .by_client = true},
          {.name = "the loss scale",
           .expected = "loss scale: 16 on rank 0, 2 on rank 1",
           .make = [=](OfRank& rank) { scaler(rank).lower_to(2); },
           .mend = [=](OfRank& rank) { scaler(rank).lower_to(16); },
           .config = half_config}};
}

TEST_P(PartedSettings, AreNamedBeforeTheStepIsAppliedAndOnceMendedItIs) {
  for (const Mistake& mistake : mistakes()) {
    SCOPED_TRACE(mistake.name);
    test::run_ranks(2, [&](comm::Communicator& communicator) {
      const State mended = trained_with(mistake, GetParam(), /*is_wrong=*/true, communicator);
      EXPECT_EQ(largest_difference(mended, trained_with(mistake, GetParam(), /*is_wrong=*/false, communicator)), 0.0);
    });
  }
}

// Each rank gives torch's scheduler its own loss: sooner or later one of them lowers the rate and the other does not.
TEST_P(PartedSettings, AreThoseOfTorchsPlateauOnTheLossOfEachRank) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto client = std::make_shared<torch::optim::AdamW>(model->parameters(), torch::optim::AdamWOptions(0.02));
    torch::optim::ReduceLROnPlateauScheduler scheduler(*client, torch::optim::ReduceLROnPlateauScheduler::min, 0.1F, 0);
    const auto engine = initialize({.model = model.ptr(),
                                    .config = small_config(GetParam(), 1),
                                    .optimizer = client,
                                    .communicator = borrowed(communicator)})
                            .engine;
    const auto step = [&](int batch, float metric) {
      engine->backward(model->loss(sample(batch, communicator.rank())));
      engine->step();
      scheduler.step(metric);
    };
    step(0, 1.0F);
    step(1, communicator.rank() == 0 ? 0.5F : 1.5F);
    EXPECT_THAT([&] { step(2, 0.0F); },
                ThrowsMessage<UsageError>(AllOf(HasSubstr("lr of parameter group 0: 0.02 on rank 0, 0.002"),
                                                HasSubstr("ReduceLROnPlateauScheduler"))));
  });
}

TEST_P(PartedSettings, AreValuesThatRanksSetOtherwise) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    const auto run = [&](bool is_wrong) {
      SmallNet model;
      const auto engine = start(model.ptr(), small_config(GetParam(), 1), communicator).engine;
      const at::Tensor parameter = model->last->bias;
      const double wrong = is_wrong && communicator.rank() == 1 ? 0.5 : 1.0;
      const auto backward = [&](int batch) { engine->backward(model->loss(sample(batch, communicator.rank()))); };
      const auto refused = [&](const std::string& call) {
        EXPECT_THAT([&] { engine->step(); },
                    ThrowsMessage<UsageError>(AllOf(HasSubstr(call + ": values of norm "), HasSubstr(" on rank 0, "))));
      };
      train(*engine, model, 1);
      const auto set = [&](double factor) {
        engine->safe_set_full_fp32_param(parameter, torch::full({3}, 0.25 * factor));
        engine->safe_set_full_optimizer_state(parameter, torch::full({3}, 0.125 * factor), "exp_avg");
      };
      set(wrong);
      if (is_wrong) {
        for (int i = 0; i < 2; ++i) {  // as long as they are not mended
          backward(1);
          refused("safe_set_full_fp32_param(last.bias)");
        }
        engine->safe_set_full_fp32_param(parameter, torch::full({3}, 0.25));
        backward(1);
        refused("safe_set_full_optimizer_state(last.bias, exp_avg)");
        set(1.0);
        backward(1);
        engine->safe_set_full_grad(parameter, torch::full({3}, wrong));
        refused("safe_set_full_grad(last.bias)");
      }
      backward(1);
      engine->safe_set_full_grad(parameter, torch::ones({3}));
      engine->step();
      backward(2);
      engine->step();
      return copy_of(engine->fp32_state_dict());
    };
    EXPECT_EQ(largest_difference(run(true), run(false)), 0.0);
  });
}

TEST_P(PartedSettings, AreAGradientThatOneRankAloneSets) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), small_config(GetParam(), 1), communicator).engine;
    engine->backward(model->loss(sample(0, communicator.rank())));
    if (communicator.rank() == 1) engine->safe_set_full_grad(model->last->bias, torch::zeros({3}));
    EXPECT_THAT(
        [&] { engine->step(); },
        ThrowsMessage<UsageError>(HasSubstr("safe_set_full_grad(last.bias): nothing on rank 0, values of norm 0")));
  });
}

// From stage 2 on each micro-batch has collectives of its own, which differ first.
TEST(PartedAccumulations, AreNamedAtTheStepOfTheOtherRank) {
  for (const int stage : {0, 1}) {
    SCOPED_TRACE(stage);
    test::run_ranks(2, [&](comm::Communicator& communicator) {
      const auto run = [&](bool is_wrong) {
        SmallNet model;
        const auto engine = start(model.ptr(), small_config(stage, 1), communicator).engine;
        const auto step = [&](int batch) {
          engine->backward(model->loss(sample(batch, communicator.rank())));
          engine->step();
        };
        const auto refused = [&](int batch, const std::string& expected) {
          EXPECT_THAT([&] { step(batch); }, ThrowsMessage<UsageError>(HasSubstr(expected)));
        };
        step(0);
        if (is_wrong) {
          const bool first = communicator.rank() == 0;
          if (!first) {
            engine->set_gradient_accumulation_boundary(false);
            step(1);
            engine->set_gradient_accumulation_boundary(std::nullopt);
          }
          refused(1, "micro-batches counted by step(): 2 on rank 0, 3 on rank 1");
          if (!first) {
            engine->set_train_batch_size(16);
            step(1);
          }
          refused(1, "gradient_accumulation_steps: 1 on rank 0, 2 on rank 1");
          if (!first) engine->set_train_batch_size(8);
        }
        step(1);
        step(2);
        EXPECT_EQ(engine->micro_steps(), 3);
        return copy_of(engine->fp32_state_dict());
      };
      EXPECT_EQ(largest_difference(run(true), run(false)), 0.0);
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Stages, PartedRanks, ::testing::Values(0, 1, 2, 3), stage_name);
INSTANTIATE_TEST_SUITE_P(Stages, PartedSettings, ::testing::Values(0, 1, 2, 3), stage_name);
INSTANTIATE_TEST_SUITE_P(Stages, PartedReductions, ::testing::Values(0, 1, 2), stage_name);

}  // namespace
}  // namespace ds::engine
