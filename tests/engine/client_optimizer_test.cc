// Optimizers of the program at every stage, step by step against the same optimizer in plain torch.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"
#include "dsengine/fused_optimizers.h"
#include "tests/model/client_run.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using test::run_ranks;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr double kFloat32 = 5e-6;
constexpr double kHalf = 5e-3;

double difference_on_ranks(const ClientRun& run, const ordered_json& config, const MakeOptimizer& make) {
  const std::vector<double> expected = plain_losses(run, make);
  EXPECT_LT(expected.back(), 0.9 * expected.front());  // it learns
  std::vector<double> largest(static_cast<size_t>(run.world), 1e9);
  run_ranks(run.world, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto optimizer = make(model);
    const Initialized parts = start_client(model, config, optimizer, communicator);
    EXPECT_EQ(parts.optimizer, nullptr);
    largest[static_cast<size_t>(communicator.rank())] =
        trained_difference(run, *parts.engine, model, *optimizer, expected);
  });
  return *std::max_element(largest.begin(), largest.end());
}

struct Case {
  std::string name;
  int stage;
};

class ClientOptimizers : public ::testing::TestWithParam<Case> {};

TEST_P(ClientOptimizers, AgreeWithPlainTorch) {
  const auto& [name, stage] = GetParam();
  EXPECT_LT(difference_on_ranks({}, client_config(stage), of_torch(name)), kFloat32);
}

std::vector<Case> cases() {
  std::vector<Case> result;
  for (const char* name : {"SGD", "Nesterov", "Adam", "AMSGrad", "AdamW", "RMSprop", "Adagrad"}) {
    for (int stage = 0; stage < 4; ++stage) result.push_back({name, stage});
  }
  return result;
}

INSTANTIATE_TEST_SUITE_P(Stages, ClientOptimizers, ::testing::ValuesIn(cases()),
                         [](const auto& variant) { return cat(variant.param.name, "Stage", variant.param.stage); });

// FusedAdamW against torch's class, with the same two groups.
TEST(FusedClientOptimizer, FusedAdamWAgreesWithTorchsAdamW) {
  const auto options = torch::optim::AdamWOptions(0.02).weight_decay(0.1);
  const MakeOptimizer fused = [&](const SmallNet& model) { return two_groups<FusedAdamW>(model, options, 0.005); };
  const std::vector<double> expected = plain_losses({}, of_torch("AdamW"));
  for (const int stage : {0, 2}) {
    std::vector<double> largest(2, 1e9);
    run_ranks(2, [&](comm::Communicator& communicator) {
      SmallNet model;
      const auto optimizer = fused(model);
      const Initialized parts = start_client(model, client_config(stage), optimizer, communicator);
      largest[static_cast<size_t>(communicator.rank())] =
          trained_difference({}, *parts.engine, model, *optimizer, expected);
    });
    EXPECT_LT(largest[0], kFloat32) << "stage " << stage;
    EXPECT_LT(largest[1], kFloat32) << "stage " << stage;
  }
}

class ClientOptimizerAtStages : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Stages, ClientOptimizerAtStages, ::testing::Values(0, 1, 2, 3));

TEST_P(ClientOptimizerAtStages, ClippingAndAccumulation) {
  const int stage = GetParam();
  ordered_json config = client_config(stage, 3);
  config["gradient_clipping"] = 0.3;
  EXPECT_LT(difference_on_ranks({.world = 3, .steps = 20, .accumulation = 3, .clip_norm = 0.3}, config,
                                of_torch(stage % 2 == 0 ? "Adam" : "SGD")),
            kFloat32);
}

TEST_P(ClientOptimizerAtStages, SchedulersOfTorchDriveIt) {
  const ClientRun run = {.after_steps = [](torch::optim::Optimizer& optimizer) -> std::function<void()> {
    const auto schedule = std::make_shared<torch::optim::StepLR>(optimizer, 10, 0.5);
    return [schedule] { schedule->step(); };
  }};
  EXPECT_LT(difference_on_ranks(run, client_config(GetParam()), of_torch("AdamW")), kFloat32);
}

// The same values in 16 bits, so that losses differ by what rounding makes of weights and activations.
TEST_P(ClientOptimizerAtStages, SixteenBits) {
  for (const char* precision : {"bf16", "fp16"}) {
    for (const char* name : {"AdamW", "SGD"}) {
      ordered_json config = client_config(GetParam());
      config[precision] = {{"enabled", true}};
      if (precision[0] == 'f') config["fp16"]["initial_scale_power"] = 8;
      ordered_json own = config;
      own["zero_allow_untested_optimizer"] = true;
      const MakeOptimizer make = [&](const SmallNet& model) -> std::shared_ptr<torch::optim::Optimizer> {
        if (name[0] == 'A') {
          return std::make_shared<torch::optim::AdamW>(model->parameters(),
                                                       torch::optim::AdamWOptions(0.002).weight_decay(0.1));
        }
        return std::make_shared<torch::optim::SGD>(model->parameters(), torch::optim::SGDOptions(0.01).momentum(0.9));
      };
      own["optimizer"] = {{"type", name}, {"params", {{"lr", 0.01}, {"momentum", 0.9}}}};
      if (name[0] == 'A') own["optimizer"]["params"] = {{"lr", 0.002}, {"weight_decay", 0.1}};
      run_ranks(2, [&](comm::Communicator& communicator) {
        SmallNet model, other;
        const auto optimizer = make(model);
        const auto client = start_client(model, config, optimizer, communicator).engine;
        const auto configured = start(other.ptr(), own, communicator).engine;
        double largest = 0;
        for (int64_t step = 0; step < 50; ++step) {
          const at::Tensor a = model->loss(sample(step, communicator.rank()));
          const at::Tensor b = other->loss(sample(step, communicator.rank()));
          largest = std::max(largest, std::abs(a.item<double>() - b.item<double>()));
          client->backward(a);
          client->step();
          configured->backward(b);
          configured->step();
          EXPECT_EQ(client->was_step_applied(), configured->was_step_applied());
        }
        EXPECT_LT(largest, kHalf) << precision << " " << name;
        EXPECT_EQ(client->loss_scale(), configured->loss_scale());
        EXPECT_LT(largest_difference(copy_of(client->fp32_state_dict()), copy_of(configured->fp32_state_dict())),
                  kHalf);
      });
    }
  }
}

TEST_P(ClientOptimizerAtStages, AnOverflowIsSkippedAndHalvesTheScale) {
  ordered_json config = client_config(GetParam());
  config["fp16"] = {{"enabled", true}, {"initial_scale_power", 8}, {"hysteresis", 1}};
  run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto optimizer = torch_optimizer("AdamW", model);
    const auto engine = start_client(model, config, optimizer, communicator).engine;
    train(*engine, model, 2);
    const State before = copy_of(engine->fp32_state_dict());
    at::Tensor loss = model->loss(sample(2, communicator.rank()));
    if (communicator.rank() == 1) loss = loss * std::numeric_limits<float>::infinity();
    engine->backward(loss);
    engine->step();
    EXPECT_FALSE(engine->was_step_applied());
    EXPECT_EQ(engine->loss_scale(), 128);
    EXPECT_EQ(largest_difference(copy_of(engine->fp32_state_dict()), before), 0.0);
    train(*engine, model, 1);
    EXPECT_TRUE(engine->was_step_applied());
  });
}

// A rate that follows from the last one and from the number of steps.
struct DecayLr : torch::optim::LRScheduler {
  using LRScheduler::LRScheduler;
  std::vector<double> get_lrs() override {
    std::vector<double> rates = get_current_lrs();
    for (double& rate : rates) rate *= step_count_ == 0 ? 1.0 : step_count_ % 2 == 0 ? 0.5 : 0.75;
    return rates;
  }
};

using MakeSchedule = std::function<std::shared_ptr<torch::optim::LRScheduler>(torch::optim::Optimizer&)>;

std::shared_ptr<torch::optim::LRScheduler> step_lr(torch::optim::Optimizer& optimizer) {
  return std::make_shared<torch::optim::StepLR>(optimizer, /*step_size=*/3, /*gamma=*/0.5);
}

std::shared_ptr<torch::optim::LRScheduler> decay_lr(torch::optim::Optimizer& optimizer) {
  return std::make_shared<DecayLr>(optimizer);
}

// A run of an optimizer of the program's with a scheduler of torch's.
struct ScheduledRun {
  ScheduledRun(int stage, const MakeSchedule& make, comm::Communicator& communicator)
      : optimizer(torch_optimizer("AdamW", model)),
        engine(initialize({.model = model.ptr(),
                           .config = client_config(stage),
                           .optimizer = optimizer,
                           .torch_scheduler = make(*optimizer),
                           .communicator = borrowed(communicator)})
                   .engine) {}
  // Trains, and returns the multiple of the first rate that each step had.
  std::vector<double> factors(int steps) {
    std::vector<double> result;
    for (int step = 0; step < steps; ++step) {
      result.push_back(engine->get_lr()[0] / 0.02);
      EXPECT_NEAR(engine->get_lr()[1] / 0.005, result.back(), 1e-12);
      train(*engine, model, 1);
    }
    return result;
  }

  SmallNet model;
  std::shared_ptr<torch::optim::Optimizer> optimizer;
  std::shared_ptr<Engine> engine;
};

TEST_P(ClientOptimizerAtStages, TorchsSchedulersFallAsPythonsAndComeBack) {
  const auto are = [](const std::vector<double>& factors) {
    return testing::Pointwise(testing::DoubleNear(1e-12), factors);
  };
  const std::vector<std::pair<MakeSchedule, std::vector<double>>> cases = {
      {step_lr, {1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25}},
      {decay_lr, {1, 0.75, 0.375, 0.28125, 0.140625, 0.10546875, 0.052734375, 0.03955078125, 0.019775390625}}};
  for (const auto& one : cases) {
    const MakeSchedule& make = one.first;
    const std::vector<double>& expected = one.second;
    const test::ScratchFolder folder;
    run_ranks(2, [&](comm::Communicator& communicator) {
      const std::vector<double> rest(expected.begin() + 4, expected.end());
      ScheduledRun at_once(GetParam(), make, communicator);
      std::vector<double> found = at_once.factors(4);
      at_once.engine->save_checkpoint(folder.path().string());
      const std::vector<double> after = at_once.factors(5);
      found.insert(found.end(), after.begin(), after.end());
      EXPECT_THAT(found, are(expected));
      ScheduledRun resumed(GetParam(), make, communicator);
      resumed.engine->load_checkpoint(folder.path().string());
      EXPECT_THAT(resumed.factors(5), are(rest));
      EXPECT_EQ(
          largest_difference(copy_of(resumed.engine->fp32_state_dict()), copy_of(at_once.engine->fp32_state_dict())),
          0.0);
      at_once.engine->load_checkpoint(folder.path().string());  // back, in the same run
      EXPECT_THAT(at_once.factors(5), are(rest));
    });
  }
}

// The plain loop makes the scheduler's first step at once, as Python's constructors do.
TEST_P(ClientOptimizerAtStages, StepLrTrainsAsLibTorchsInAPlainLoopAlsoResumed) {
  const ClientRun plain{.steps = 9, .after_steps = [](torch::optim::Optimizer& optimizer) {
                          const auto schedule = step_lr(optimizer);
                          schedule->step();
                          return [schedule] { schedule->step(); };
                        }};
  const std::vector<double> expected = plain_losses(plain, of_torch("AdamW"));
  const test::ScratchFolder folder;
  run_ranks(2, [&](comm::Communicator& communicator) {
    ScheduledRun begun(GetParam(), step_lr, communicator);
    EXPECT_LT(trained_difference({.steps = 5}, *begun.engine, begun.model, *begun.optimizer, expected), kFloat32);
    begun.engine->save_checkpoint(folder.path().string());
    ScheduledRun resumed(GetParam(), step_lr, communicator);
    resumed.engine->load_checkpoint(folder.path().string());
    EXPECT_LT(trained_difference({.steps = 9}, *resumed.engine, resumed.model, *resumed.optimizer, expected, 5),
              kFloat32);
  });
}

TEST(TorchScheduler, MistakesAreNamed) {
  run_ranks(1, [&](comm::Communicator& communicator) {
    SmallNet other;
    const auto elsewhere = torch_optimizer("AdamW", other);
    EXPECT_THAT(
        [&] {
          ScheduledRun(
              1, [&](auto&) { return step_lr(*elsewhere); }, communicator);
        },
        ThrowsMessage<UsageError>(HasSubstr("another optimizer")));
    const auto stepped = [](torch::optim::Optimizer& optimizer) {
      const auto schedule = step_lr(optimizer);
      schedule->step();
      return schedule;
    };
    EXPECT_THAT([&] { ScheduledRun(1, stepped, communicator); },
                ThrowsMessage<UsageError>(HasSubstr("expected one that has not stepped")));
    SmallNet model;
    EXPECT_THAT(
        [&] {
          initialize({.model = model.ptr(),
                      .config = small_config(1, 1),
                      .torch_scheduler = step_lr(*elsewhere),
                      .communicator = borrowed(communicator)});
        },
        ThrowsMessage<ConfigError>(HasSubstr(".torch_scheduler: expected the .optimizer")));
    std::shared_ptr<torch::optim::LRScheduler> schedule;
    ScheduledRun twice(
        1, [&](torch::optim::Optimizer& optimizer) { return schedule = step_lr(optimizer); }, communicator);
    schedule->step();  // as in a plain loop
    EXPECT_THAT([&] { train(*twice.engine, twice.model, 1); },
                ThrowsMessage<UsageError>(HasSubstr("expected 1 calls so far, found 2")));
  });
}

// Nothing of a scheduler that the program steps is in a checkpoint but the rates that it has set.
TEST_P(ClientOptimizerAtStages, ASchedulerOfTheProgramsOwnIsToldAtALoad) {
  const auto log_of_load = [&](bool stepped) {
    const test::ScratchFolder folder;
    testing::internal::CaptureStderr();
    run_ranks(1, [&](comm::Communicator& communicator) {
      SmallNet model;
      const auto optimizer = torch_optimizer("SGD", model);
      const auto engine = start_client(model, client_config(GetParam()), optimizer, communicator).engine;
      torch::optim::StepLR schedule(*optimizer, 1, 0.5);
      for (int step = 0; step < 3; ++step) {
        train(*engine, model, 1);
        if (stepped) schedule.step();
      }
      engine->save_checkpoint(folder.path().string());
      SmallNet again;
      const auto own = torch_optimizer("SGD", again);
      start_client(again, client_config(GetParam()), own, communicator).engine->load_checkpoint(folder.path().string());
      EXPECT_EQ(learning_rates(*own), learning_rates(*optimizer));
    });
    return testing::internal::GetCapturedStderr();
  };
  EXPECT_THAT(log_of_load(true), HasSubstr("Give a torch::optim::LRScheduler to initialize() as .torch_scheduler"));
  EXPECT_THAT(log_of_load(false), testing::Not(HasSubstr(".torch_scheduler")));
}

TEST(ClientOptimizer, WorksOnTheHost) {
  for (const int stage : {1, 2, 3}) {
    for (const char* name : {"SGD", "Adam", "AMSGrad", "RMSprop", "Adagrad"}) {
      ordered_json config = client_config(stage);
      config["zero_optimization"]["offload_optimizer"] = {{"device", "cpu"}};
      if (stage == 3) config["zero_optimization"]["offload_param"] = {{"device", "cpu"}};
      EXPECT_LT(difference_on_ranks({.steps = 20}, config, of_torch(name)), kFloat32) << name << " stage " << stage;
    }
  }
}

TEST(ClientOptimizer, ItsStatesLieInFiles) {
  ordered_json config = client_config(3);
  config["zero_optimization"]["offload_optimizer"] = {{"device", "nvme"}, {"nvme_path", "/tmp"}};
  for (const char* name : {"SGD", "RMSprop", "Adagrad"}) {
    EXPECT_LT(difference_on_ranks({.steps = 20}, config, of_torch(name)), kFloat32) << name;
  }
}

TEST(ClientOptimizer, HoldsSlicesAndStaysTheProgramsObject) {
  run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto optimizer = torch_optimizer("AdamW", model);
    const auto engine = start_client(model, client_config(2), optimizer, communicator).engine;
    int64_t held = 0;
    int64_t whole = 0;
    for (const auto& group : optimizer->param_groups()) {
      for (const at::Tensor& slice : group.params()) held += slice.numel();
    }
    for (const at::Tensor& parameter : model->parameters()) whole += parameter.numel();
    EXPECT_LT(held, whole);
    EXPECT_THAT(engine->get_lr(), ::testing::ElementsAre(0.02, 0.005));
    EXPECT_EQ(engine->get_type(), "AdamW");
    optimizer->param_groups()[1].options().set_lr(0.001);
    EXPECT_THAT(engine->get_lr(), ::testing::ElementsAre(0.02, 0.001));
    train(*engine, model, 1);
    EXPECT_EQ(engine->model_state_bytes().optimizer, held * 8);
    const auto state = engine->safe_get_full_optimizer_state(model->first->weight, "exp_avg");
    EXPECT_EQ(state.sizes(), model->first->weight.sizes());
    EXPECT_GT(state.abs().max().item<double>(), 0);
  });
}

// As with torch: what is in no group stays, what is frozen too.
TEST(ClientOptimizer, WhatItDoesNotHaveStays) {
  for (const int stage : {0, 2, 3}) {
    run_ranks(2, [&](comm::Communicator& communicator) {
      SmallNet model, plain;
      const State before = parameters_of(*model);
      model->norm->weight.set_requires_grad(false);
      plain->norm->weight.set_requires_grad(false);
      const auto make = [](const SmallNet& net) {
        std::vector<at::Tensor> some = net->first->parameters();
        some.push_back(net->norm->weight);
        return std::make_shared<torch::optim::AdamW>(some, torch::optim::AdamWOptions(0.02));
      };
      const auto optimizer = make(model);
      const auto engine = start_client(model, client_config(stage), optimizer, communicator).engine;
      const State after = train(*engine, model, 4);
      const auto own = make(plain);
      TorchRun{.world = 2, .steps = 4}.train(plain, *own);
      EXPECT_LT(largest_difference(after, parameters_of(*plain)), 2e-6) << stage;
      EXPECT_TRUE(after.at("last.weight").equal(before.at("last.weight")));
    });
  }
}

// The program has trained with it before.
TEST(ClientOptimizer, GoesOnWithTheStatesThatItHas) {
  for (const char* name : {"SGD", "AMSGrad", "Adagrad"}) {
    const ClientRun run = {.world = 1, .steps = 20};
    const std::vector<double> expected = plain_losses(run, of_torch(name));
    run_ranks(1, [&](comm::Communicator& communicator) {
      SmallNet model;
      const auto optimizer = torch_optimizer(name, model);
      TorchRun{.world = 1, .steps = 8}.train(model, *optimizer);
      const auto engine = start_client(model, client_config(3), optimizer, communicator).engine;
      EXPECT_LT(trained_difference(run, *engine, model, *optimizer, expected, 8), kFloat32) << name;
    });
  }
}

TEST(ClientOptimizer, ParametersOfAnotherModelAreNamed) {
  run_ranks(1, [&](comm::Communicator& communicator) {
    SmallNet model, other;
    const auto optimizer = torch_optimizer("AdamW", other);
    EXPECT_THAT([&] { start_client(model, client_config(1), optimizer, communicator); },
                ThrowsMessage<UsageError>(AllOf(HasSubstr("[11, 6]"), HasSubstr("model->parameters()"))));
    const auto once = torch_optimizer("AdamW", model);
    const auto engine = start_client(model, client_config(1), once, communicator).engine;
    SmallNet third;
    EXPECT_THAT([&] { start_client(third, client_config(1), once, communicator); },
                ThrowsMessage<UsageError>(HasSubstr("another engine")));
  });
}

TEST(ClientOptimizer, WhatRunsBesideTheProgramIsRefused) {
  run_ranks(1, [&](comm::Communicator& communicator) {
    for (const char* key : {"delayed_update", "super_offload"}) {
      SmallNet model;
      ordered_json config = client_config(2);
      config["zero_optimization"]["offload_optimizer"] = {{"device", "cpu"}, {key, true}};
      EXPECT_THAT([&] { start_client(model, config, torch_optimizer("AdamW", model), communicator); },
                  ThrowsMessage<ConfigError>(AllOf(HasSubstr(key), HasSubstr("AdamW"))));
    }
  });
}

}  // namespace
}  // namespace ds::engine
