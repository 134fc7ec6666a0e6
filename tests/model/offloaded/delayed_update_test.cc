// delayed_update: what can go wrong beside it, and in it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "core/check.h"
#include "core/text.h"
#include "dsengine/engine.h"
#include "model/offloaded/offloaded_state.h"
#include "tests/model/offloaded/offload_run.h"
#include "tests/model/small_run.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

ordered_json delayed(const ordered_json& device) {
  ordered_json section = device;
  section["delayed_update"] = true;
  section["delayed_update_start"] = 1;
  return section;
}

TEST(DelayedUpdate, OneThatThrowsIsReportedOnceAndForgotten) {
  test::run_ranks(1, [&](comm::Communicator& communicator) {
    TwoBuckets two(with_offload(small_config(2, 1), delayed(on_host())), communicator);
    OffloadedState& state = two.state;
    const auto& optimizer = two.optimizer;
    const auto begin = [&](const std::function<void(const at::Tensor&)>& prepare) {
      for (size_t b = 0; b < two.buckets.size(); ++b) state.gradients()->add(b, two.ones(b));
      optimizer->begin_step();
      state.start_update(*optimizer, 1.0, prepare);
    };
    const auto ignore = [](size_t /*bucket*/, const at::Tensor& /*weights*/) {};
    for (int failure = 0; failure < 2; ++failure) {
      begin([](const at::Tensor& /*gradient*/) { throw IoError("the disk is gone"); });
      EXPECT_THAT([&] { state.finish_update(ignore); }, ThrowsMessage<IoError>(HasSubstr("the disk is gone")));
      EXPECT_FALSE(state.update_runs());
    }
    begin([](const at::Tensor& /*gradient*/) {});
    size_t published = 0;
    state.finish_update([&](size_t /*bucket*/, const at::Tensor& weights) {
      EXPECT_LT(weights.max().item<double>(), 1.0);
      ++published;
    });
    EXPECT_EQ(published, two.buckets.size());
  });
}

// Gradients that do not depend on the weights: a delayed update then makes the same weights as one that is not.
struct LinearLoss : torch::nn::Module {
  LinearLoss() {
    a = register_parameter("a", torch::full({48}, 0.5));
    b = register_parameter("b", torch::full({24}, 0.25));
  }
  at::Tensor loss(int64_t step) {
    const auto typed = a.scalar_type();
    return ((a * torch::arange(48)).sum() + (b * torch::arange(24)).sum()).to(typed) * (0.01 * (1.0 + 0.5 * step));
  }
  at::Tensor a, b;
};

State train_linear(const ordered_json& config, comm::Communicator& communicator,
                   const std::function<void(Engine&, LinearLoss&, int64_t step)>& before_step = {}) {
  const auto model = std::make_shared<LinearLoss>();
  const auto engine = start(model, config, communicator).engine;
  for (int64_t step = 0; step < 8; ++step) {
    if (before_step) before_step(*engine, *model, step);
    engine->backward(model->loss(step));
    engine->step();
  }
  return copy_of(engine->fp32_state_dict());
}

TEST(DelayedUpdate, EachUpdateHasTheLearningRateOfItsStep) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    for (const int stage : {1, 2, 3}) {
      ordered_json config = small_config(stage, 1);
      config["scheduler"] = {{"type", "WarmupDecayLR"},
                             {"params", {{"warmup_num_steps", 4}, {"warmup_max_lr", 0.1}, {"total_num_steps", 8}}}};
      const State expected = train_linear(config, communicator);
      EXPECT_EQ(largest_difference(train_linear(with_offload(config, delayed(on_host())), communicator), expected),
                0.0);
      EXPECT_EQ(largest_difference(train_linear(with_offload(config, delayed(on_disk())), communicator), expected),
                0.0);
    }
  });
}

TEST(DelayedUpdate, ASkippedStepDropsItsOwnGradientsOnly) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    ordered_json config = small_config(2, 1);
    config["fp16"] = {{"enabled", true}, {"initial_scale_power", 4}, {"hysteresis", 1}};
    const auto overflow = [](Engine& engine, LinearLoss& model, int64_t step) {
      if (step % 3 != 1) return;
      engine.backward(model.loss(step) * std::numeric_limits<float>::infinity());
      engine.step();
      EXPECT_FALSE(engine.was_step_applied());
    };
    const State expected = train_linear(config, communicator, overflow);
    EXPECT_EQ(
        largest_difference(train_linear(with_offload(config, delayed(on_host())), communicator, overflow), expected),
        0.0);
  });
}

TEST(DelayedUpdate, DroppedGradientsAndReadsInBetweenDoNotDisturbIt) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    for (const int stage : {1, 2, 3}) {
      const ordered_json config = small_config(stage, 1);
      const auto disturb = [](Engine& engine, LinearLoss& model, int64_t step) {
        engine.backward(model.loss(step + 3));
        engine.zero_grad();
        if (step % 2 == 0) engine.fp32_state_dict();
        if (step % 3 == 0) engine.module_state_dict();
        if (step == 4) {
          engine.offload_states();
          engine.reload_states();
        }
      };
      const State expected = train_linear(config, communicator);
      const ordered_json parameters = stage == 3 ? on_disk({{"max_in_cpu", 0}, {"buffer_count", 2}}) : ordered_json();
      const ordered_json with = with_offload(config, delayed(on_host({{"ratio", 0.6}})), parameters);
      EXPECT_EQ(largest_difference(train_linear(with, communicator, disturb), expected), 0.0) << stage;
    }
  });
}

TEST(DelayedUpdate, AChangeInPlaceBesideItIsRefusedByName) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    for (const int stage : {1, 2, 3}) {
      SmallNet model;
      const auto engine =
          start(model.ptr(), with_offload(small_config(stage, 1), delayed(on_host())), communicator).engine;
      for (int64_t step = 0; step < 2; ++step) {
        engine->backward(model->loss(sample(step, communicator.rank())));
        engine->step();
      }
      {
        const torch::NoGradGuard no_grad;
        model->last->bias.fill_(0.5);
      }
      EXPECT_THAT(
          [&] { engine->backward(model->loss(sample(2, communicator.rank()))); },
          ThrowsMessage<UsageError>(::testing::AllOf(HasSubstr("backward(): parameter last.bias"),
                                                     HasSubstr("delayed_update"), HasSubstr("gathered_parameters"))))
          << stage;
    }
  });
}

TEST(DelayedUpdate, AFailedStepDoesNotStopTheNextOnes) {
  const int world = 2;
  test::run_ranks(world, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), with_offload(small_config(2, 1), delayed(on_host())), communicator).engine;
    train(*engine, model, 2);
    EXPECT_NO_THROW(engine->synchronize_parameters());
    expect_failing_step(*engine, model);
    const State before = copy_of(engine->fp32_state_dict());
    EXPECT_GT(largest_difference(train(*engine, model, 2), before), 0.0);
  });
}

TEST(DelayedUpdate, EnginesEndWhileOneRuns) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    for (const int stage : {1, 2, 3}) {
      const ordered_json parameters = stage == 3 ? on_host() : ordered_json();
      const ordered_json config = with_offload(small_config(stage, 1), delayed(on_disk()), parameters);
      SmallNet never;
      start(never.ptr(), config, communicator);  // ends before its first step
      SmallNet a, b;
      auto first = start(a.ptr(), config, communicator).engine;
      auto second = start(b.ptr(), config, communicator).engine;
      for (int64_t step = 0; step < 2; ++step) {
        first->backward(a->loss(sample(step, communicator.rank())));
        first->step();
        second->backward(b->loss(sample(step, communicator.rank())));
        second->step();
      }
      const auto optimizer = first->optimizer();  // lives longer than its engine
      first.reset();
      EXPECT_EQ(optimizer->step_count(), 2);
      EXPECT_GT(largest_difference(train(*second, b, 1), parameters_of(*SmallNet())), 0.0);
    }
  });
}

}  // namespace
}  // namespace ds::engine
