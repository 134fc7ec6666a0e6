// Steps that are refused or fail, and what the program does then: nothing of them is left in later ones.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>

#include "core/check.h"
#include "tests/porting/ported_run.h"
#include "tests/support/scratch_folder.h"

namespace ds::engine {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

class RefusedSteps : public ::testing::TestWithParam<int> {};

// Every parameter has a bucket of its own.
nlohmann::ordered_json with_small_buckets(int stage) {
  nlohmann::ordered_json config = small_config(stage, 1);
  config["zero_optimization"]["reduce_bucket_size"] = 8;
  config["zero_optimization"]["stage3_prefetch_bucket_size"] = 8;
  return config;
}

// Refused by what the module looks like; mended and called again, it is the step it would have been.
TEST_P(RefusedSteps, ComeAboutOnceTheProgramHasMendedWhatWasWrong) {
  for (const int64_t accumulation : {1, 2}) {
    SCOPED_TRACE(accumulation);
    test::run_ranks(2, [&](comm::Communicator& communicator) {
      const auto run = [&](bool is_refused) {
        SmallNet model;
        const auto engine = start(model.ptr(), small_config(GetParam(), accumulation), communicator).engine;
        for (int64_t batch = 0; batch < 3 * accumulation; ++batch) {
          engine->backward(model->loss(sample(batch, communicator.rank())));
          if (is_refused && batch == 2 * accumulation - 1) {
            const int64_t micro_steps = engine->micro_steps();
            const auto norm = model->norm;
            model->replace_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({11})));
            EXPECT_THAT([&] { engine->step(); }, ThrowsMessage<UsageError>(HasSubstr("norm.weight")));
            EXPECT_EQ(engine->micro_steps(), micro_steps);
            EXPECT_EQ(engine->global_steps(), 1);
            model->replace_module("norm", norm);
          }
          engine->step();
        }
        EXPECT_EQ(engine->global_steps(), 3);
        return copy_of(engine->fp32_state_dict());
      };
      EXPECT_EQ(largest_difference(run(true), run(false)), 0.0);
    });
  }
}

// What was to be clipped belongs to the gradients of the step that failed.
TEST_P(RefusedSteps, TakeTheClippingOfAFailedStepWithThem) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    const auto run = [&](bool fails) {
      SmallNet model;
      const auto engine = start(model.ptr(), small_config(GetParam(), 1), communicator).engine;
      if (fails) {
        engine->backward(model->loss(sample(9, communicator.rank())));
        engine->clip_grad_norm_(1e-3 * (1 + communicator.rank()));
        EXPECT_THROW(engine->step(), UsageError);
      }
      train(*engine, model, 2);
      return copy_of(engine->fp32_state_dict());
    };
    EXPECT_EQ(largest_difference(run(true), run(false)), 0.0);
  });
}

TEST(RefusedStepsAtStage0, AreThoseWhoseGradientsOneRankAloneHasChanged) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), small_config(0, 1), communicator).engine;
    const std::function<void()> changes[] = {[&] { engine->clip_grad_norm_(0.01 * (1 + communicator.rank())); },
                                             [&] {
                                               if (communicator.rank() == 1) model->last->bias.mutable_grad().zero_();
                                             }};
    for (const std::function<void()>& change : changes) {
      engine->backward(model->loss(sample(0, communicator.rank())));
      change();
      EXPECT_THAT([&] { engine->step(); },
                  ThrowsMessage<UsageError>(AllOf(HasSubstr("changed the gradients of the step in different ways"),
                                                  HasSubstr("rank 1: step 1"))));
    }
    // Nothing was applied: it goes on from its start.
    train(*engine, model, 3);
    EXPECT_LT(largest_difference(copy_of(engine->fp32_state_dict()), TorchRun{.world = 2, .steps = 3}.train_adamw()),
              1e-5);
  });
}

TEST_P(RefusedSteps, DoNotComeOfParametersThatAreFrozenLater) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    nlohmann::ordered_json config = small_config(GetParam(), 1);
    config["zero_optimization"]["ignore_unused_parameters"] = false;
    const auto engine = start(model.ptr(), config, communicator).engine;
    train(*engine, model, 1);
    model->first->weight.set_requires_grad(false);
    const at::Tensor before = engine->safe_get_full_fp32_param(model->first->weight).clone();
    train(*engine, model, 2);
    EXPECT_EQ(engine->global_steps(), 3);
    EXPECT_TRUE(engine->safe_get_full_fp32_param(model->first->weight).equal(before));
  });
}

// What a scope does not cover is looked at by the next call of the engine.
TEST_P(RefusedSteps, KnowWhatWasChangedBesideAScope) {
  for (const bool on_all : {false, true}) {
    SCOPED_TRACE(on_all);
    test::run_ranks(2, [&](comm::Communicator& communicator) {
      SmallNet model;
      const auto engine = start(model.ptr(), with_bf16(with_small_buckets(GetParam())), communicator).engine;
      train(*engine, model, 1);
      {
        const auto scope = engine->gathered_parameters({model->norm->weight}, /*modifier_rank=*/0);
        const torch::NoGradGuard no_grad;
        // At stage 3 an operator of one rank alone is an error of its own.
        if (on_all || communicator.rank() == 1 || GetParam() == 3) {
          model->last->bias.fill_(on_all ? 0.5 : 0.1 * communicator.rank());
        }
      }
      if (on_all) {
        EXPECT_TRUE(engine->safe_get_full_fp32_param(model->last->bias).equal(torch::full({3}, 0.5)));
        train(*engine, model, 1);
        return;
      }
      engine->backward(model->loss(sample(1, communicator.rank())));
      EXPECT_THAT([&] { engine->step(); },
                  ThrowsMessage<UsageError>(AllOf(HasSubstr("changed or frozen parameters in different ways"),
                                                  HasSubstr("changed last.bias"))));
    });
  }
}

TEST_P(RefusedSteps, AreOverOnceEveryRankHasLoadedACheckpoint) {
  class Numbered : public torch::data::datasets::Dataset<Numbered> {
   public:
    torch::data::Example<> get(size_t index) override {
      return {sample(static_cast<int64_t>(index), 0).select(0, 0), torch::zeros({1})};
    }
    torch::optional<size_t> size() const override { return 64; }
  };
  const test::ScratchFolder folder;
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    auto parts = initialize({.model = model.ptr(),
                             .config = small_config(GetParam(), 1),
                             .training_data = Numbered(),
                             .communicator = borrowed(communicator)});
    Engine& engine = *parts.engine;
    const auto step = [&] {
      const auto batch = parts.loader->begin();
      engine.backward(model->loss(batch->data));
      engine.step();
    };
    step();
    engine.save_checkpoint(folder.path().string(), "one");
    if (communicator.rank() == 1) parts.loader->begin();
    EXPECT_THAT(step, ThrowsMessage<UsageError>(HasSubstr("different numbers of batches")));
    ASSERT_TRUE(engine.load_checkpoint(folder.path().string(), "one"));
    step();
    EXPECT_EQ(engine.global_steps(), 2);
  });
}

INSTANTIATE_TEST_SUITE_P(Stages, RefusedSteps, ::testing::Values(0, 1, 2, 3), stage_name);

TEST(EnginesEnd, LeavesParametersAsTheyWere) {
  test::run_ranks(1, [&](comm::Communicator& communicator) {
    for (const int stage : {0, 1}) {
      SmallNet model;
      auto engine = start(model.ptr(), small_config(stage, 1), communicator).engine;
      engine->backward(model->loss(sample(0, 0)));
      engine.reset();
      for (const at::Tensor& parameter : model->parameters()) EXPECT_FALSE(parameter.grad().defined());
    }
    // One that evaluates only, and is not made.
    SmallNet model;
    nlohmann::ordered_json config = small_config(0, 1);
    config.erase("optimizer");
    model->last->bias.set_requires_grad(false);
    model->register_buffer("complex", torch::zeros({2}, torch::kComplexFloat));
    EXPECT_THAT([&] { start(model.ptr(), config, communicator); }, ThrowsMessage<UsageError>(HasSubstr("complex")));
    for (const auto& item : model->named_parameters()) {
      EXPECT_EQ(item.value().requires_grad(), item.key() != "last.bias") << item.key();
    }
  });
}

}  // namespace
}  // namespace ds::engine
