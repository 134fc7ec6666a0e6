// torch_autocast as a state of the thread that several engines share, one after the other or at once.
#include "model/state/autocast.h"

#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>

#include "tests/model/small_run.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr auto kDevice = at::kCPU;

// "off", or the dtype that operators run in.
std::string in_force() {
  return at::autocast::is_autocast_enabled(kDevice) ? cat(at::autocast::get_autocast_dtype(kDevice)) : "off";
}

std::unique_ptr<Autocast> autocast_of(std::optional<at::ScalarType> dtype) {
  return std::make_unique<Autocast>(kDevice, dtype);
}

ordered_json autocast_config(int stage) {
  ordered_json config = small_config(stage, 1);
  config["torch_autocast"] = {{"enabled", true}, {"dtype", "bfloat16"}};
  return config;
}

TEST(AutocastOfAThread, EnginesEndInAnyOrder) {
  for (const bool newest_first : {false, true}) {
    auto first = autocast_of(at::kBFloat16);
    auto second = autocast_of(at::kHalf);
    auto third = autocast_of(at::kBFloat16);
    EXPECT_EQ(in_force(), "BFloat16");
    if (newest_first) {
      third.reset();
      EXPECT_EQ(in_force(), "Half");
    }
    first.reset();
    EXPECT_EQ(in_force(), newest_first ? "Half" : "BFloat16");
    second.reset();
    EXPECT_EQ(in_force(), newest_first ? "off" : "BFloat16");
    third.reset();
    EXPECT_EQ(in_force(), "off");
  }
}

// By the rule of torch.amp.GradScaler, as DeepSpeed does it.
TEST(Autocast, InFloat16HasADynamicLossScale) {
  for (const int stage : {0, 1, 2, 3}) {
    ordered_json config = autocast_config(stage);
    config["torch_autocast"]["dtype"] = "float16";
    SmallNet plain;
    torch::optim::AdamW optimizer(plain->parameters(), torch::optim::AdamWOptions(0.02).weight_decay(0.1));
    const State expected = TorchRun{.world = 2, .steps = 2}.train(plain, optimizer);
    test::run_ranks(2, [&](comm::Communicator& communicator) {
      SmallNet model;
      const auto engine = start(model.ptr(), config, communicator).engine;
      EXPECT_TRUE(engine->dynamic_loss_scale());
      EXPECT_EQ(engine->loss_scale(), 65536);
      const auto step = [&](int64_t index, float factor) {
        const at::Tensor loss = model->loss(sample(index, communicator.rank()));
        engine->backward(communicator.rank() == 0 ? loss * factor : loss);
        engine->step();
        return engine->was_step_applied();
      };
      const State before = copy_of(engine->fp32_state_dict());
      EXPECT_FALSE(step(0, std::numeric_limits<float>::infinity()));
      EXPECT_EQ(engine->loss_scale(), 32768);  // at once
      EXPECT_EQ(largest_difference(copy_of(engine->fp32_state_dict()), before), 0.0);
      int64_t applied = 0;
      for (int tries = 0; applied < 2 && tries < 20; ++tries) applied += step(applied, 1.0F) ? 1 : 0;
      EXPECT_EQ(applied, 2);
      EXPECT_LT(largest_difference(copy_of(engine->fp32_state_dict()), expected), 2e-2) << stage;
    });
  }
}

TEST(AutocastOfAThread, WithoutItAnotherEnginesIsOffAndTheProgramsStays) {
  auto first = autocast_of(at::kBFloat16);
  auto plain = autocast_of(std::nullopt);
  EXPECT_EQ(in_force(), "off");
  first.reset();
  EXPECT_EQ(in_force(), "off");
  first = autocast_of(at::kBFloat16);
  EXPECT_EQ(in_force(), "BFloat16");
  plain.reset();
  EXPECT_EQ(in_force(), "BFloat16");
  first.reset();
  EXPECT_EQ(in_force(), "off");

  at::autocast::set_autocast_enabled(kDevice, true);  // the program
  plain = autocast_of(std::nullopt);
  EXPECT_NE(in_force(), "off");
  plain.reset();
  EXPECT_NE(in_force(), "off");
  at::autocast::set_autocast_enabled(kDevice, false);
}

TEST(AutocastOfAThread, AnEngineThatEndsElsewhereIsNoticedAtTheNextCall) {
  auto first = autocast_of(at::kBFloat16);
  std::thread([&first] {
    EXPECT_EQ(in_force(), "off");
    first.reset();
    const Autocast own(kDevice, at::kHalf);
    EXPECT_EQ(in_force(), "Half");
  }).join();
  EXPECT_EQ(in_force(), "BFloat16");  // nobody else may change it
  { const Autocast::Pause call(kDevice); }
  EXPECT_EQ(in_force(), "off");

  std::unique_ptr<Autocast> of_ended_thread;
  std::thread([&of_ended_thread] { of_ended_thread = autocast_of(at::kBFloat16); }).join();
  of_ended_thread.reset();
  EXPECT_EQ(in_force(), "off");
}

TEST(AutocastOfAThread, EnginesThatDifferAreNamedOnceWhenOneTrains) {
  const auto said = [](const auto& calls) {
    ::testing::internal::CaptureStderr();
    calls();
    return ::testing::internal::GetCapturedStderr();
  };
  auto first = autocast_of(at::kBFloat16);
  auto second = autocast_of(std::nullopt);
  const auto call = [] { const Autocast::Pause pause(kDevice); };
  EXPECT_THAT(said(call), AllOf(HasSubstr("expected the same in all 2 engines of this thread, found BFloat16"),
                                HasSubstr("made last, none"), HasSubstr("same torch_autocast section")));
  EXPECT_EQ(said(call), "");
  EXPECT_EQ(said([&] { second = autocast_of(at::kBFloat16); }), "");
  EXPECT_EQ(said(call), "");
}

TEST(AutocastOfAThread, ASweepByAssignmentTrainsEachEngineInItsPrecision) {
  test::run_ranks(1, [](comm::Communicator& communicator) {
    SmallNet first;
    std::shared_ptr<Engine> engine = start(first.ptr(), autocast_config(0), communicator).engine;
    SmallNet second;
    engine = start(second.ptr(), autocast_config(0), communicator).engine;  // made before the first one ends
    EXPECT_EQ(second->forward(sample(0, 0)).scalar_type(), at::kBFloat16);
    train(*engine, second, 1);
    EXPECT_EQ(second->forward(sample(0, 0)).scalar_type(), at::kBFloat16);
    engine.reset();
    EXPECT_EQ(second->forward(sample(0, 0)).scalar_type(), at::kFloat);
  });
}

TEST(AutocastOfAThread, AnEngineWithoutItAfterOneWithItTrainsInFloat32) {
  test::run_ranks(1, [](comm::Communicator& communicator) {
    SmallNet model;
    const auto before = start(model.ptr(), autocast_config(0), communicator).engine;
    SmallNet plain;
    auto engine = start(plain.ptr(), small_config(0, 1), communicator).engine;
    EXPECT_EQ(plain->forward(sample(0, 0)).scalar_type(), at::kFloat);
    engine.reset();
    EXPECT_EQ(model->forward(sample(0, 0)).scalar_type(), at::kBFloat16);
  });
}

// Casts that a forward runs on this thread. All ranks together: the cache is one for all threads.
int64_t casts_of_forward(SmallNet& model, comm::Communicator& communicator) {
  communicator.barrier();
  static thread_local int64_t casts = 0;
  casts = 0;
  const auto count = [](const at::RecordFunction& function) -> std::unique_ptr<at::ObserverContext> {
    if (std::string_view(function.name()) == "aten::_to_copy") ++casts;
    return nullptr;
  };
  const auto handle = at::addThreadLocalCallback(at::RecordFunctionCallback(count).scopes({at::RecordScope::FUNCTION}));
  model->forward(sample(0, 0));
  at::removeCallback(handle);
  communicator.barrier();
  return casts;
}

// Autograd has use for a cast weight until backward, evaluation has none.
TEST(AutocastOfAThread, AtStage3WhatIsCastWithoutAGraphIsNotKept) {
  test::run_ranks(2, [](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), autocast_config(3), communicator).engine;
    train(*engine, model, 1);
    const int64_t casts = casts_of_forward(model, communicator);
    const int64_t casts_again = casts_of_forward(model, communicator);
    EXPECT_EQ(casts - casts_again, 2);  // biases; torch::nn::Linear shows autocast views of its weights
    { const Autocast::Pause drops_what_is_kept(kDevice); }
    {
      const torch::NoGradGuard no_grad;
      for (int pass = 0; pass < 3; ++pass) EXPECT_EQ(casts_of_forward(model, communicator), casts);
    }
    EXPECT_EQ(casts_of_forward(model, communicator), casts);  // the first one of training
    EXPECT_EQ(casts_of_forward(model, communicator), casts_again);
    train(*engine, model, 1);
    EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
    {
      const torch::NoGradGuard no_grad;
      model->forward(sample(0, 0));
    }
    engine->eval();
    EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
  });
}

TEST(AutocastOfAThread, EvaluationBetweenStepsChangesNoBitOfAStage3Run) {
  State trained[2];
  for (const bool evaluates : {false, true}) {
    test::run_ranks(2, [&](comm::Communicator& communicator) {
      SmallNet model;
      const auto engine = start(model.ptr(), autocast_config(3), communicator).engine;
      for (int step = 0; step < 3; ++step) {
        train(*engine, model, 1);
        const torch::NoGradGuard no_grad;
        if (evaluates) model->forward(sample(step, communicator.rank()));
      }
      const State state = copy_of(engine->fp32_state_dict());
      if (communicator.rank() == 0) trained[evaluates ? 1 : 0] = state;
    });
  }
  EXPECT_EQ(largest_difference(trained[0], trained[1]), 0.0);
}

// Autocast keeps cast copies of weights from one forward to the next.
TEST(AutocastOfAThread, ForwardsSeeMastersThatWereSet) {
  test::run_ranks(1, [&](comm::Communicator& communicator) {
    for (const int stage : {0, 1, 2, 3}) {
      SmallNet model;
      const auto engine = start(model.ptr(), autocast_config(stage), communicator).engine;
      model->forward(sample(0, 0));
      engine->safe_set_full_fp32_param(model->last->weight, torch::zeros({3, 11}));
      engine->safe_set_full_fp32_param(model->last->bias, torch::full({3}, 0.5));
      EXPECT_TRUE(model->forward(sample(0, 0)).to(torch::kFloat).equal(torch::full({4, 3}, 0.5))) << stage;
    }
  });
}

}  // namespace
}  // namespace ds::engine
