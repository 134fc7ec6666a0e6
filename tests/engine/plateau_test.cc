// scheduler.type ReduceLROnPlateau: rates follow what the program measures, alike on all ranks and after a resume.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

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

using testing::ElementsAre;
using testing::HasSubstr;
using testing::ThrowsMessage;

nlohmann::ordered_json plateau_config(int stage, int patience = 1) {
  nlohmann::ordered_json config = small_config(stage, /*accumulation=*/1);
  config["scheduler"] = {{"type", "ReduceLROnPlateau"}, {"params", {{"factor", 0.5}, {"patience", patience}}}};
  return config;
}

void step(Engine& engine, SmallNet& model, int64_t micro) {
  engine.backward(model->loss(sample(micro, engine.global_rank())));
  engine.step();
}

TEST(ReduceLrOnPlateau, TheMeanOfAllRanksCounts) {
  for (const int stage : {0, 3}) {
    test::run_ranks(2, [&](comm::Communicator& ranks) {
      SmallNet model;
      const auto parts = start(model.ptr(), plateau_config(stage), ranks);
      const auto& schedule = parts.schedule;
      std::vector<double> rates;
      int64_t micro = 0;
      // Rank 0's grow, rank 1's fall by more until the fourth.
      for (const auto& [first, second] :
           {std::pair(1.0, 9.0), {2.0, 7.0}, {3.0, 5.0}, {4.0, 6.0}, {5.0, 5.0}, {5.0, 5.0}}) {
        step(*parts.engine, model, micro++);
        schedule->step(ranks.rank() == 0 ? first : second);
        rates.push_back(schedule->get_last_lr()[0]);
      }
      EXPECT_THAT(rates, ElementsAre(0.02, 0.02, 0.02, 0.02, 0.01, 0.01));
      step(*parts.engine, model, micro);
      EXPECT_EQ(schedule->get_last_lr()[0], 0.01) << "steps alone leave it";
    });
  }
}

TEST(ReduceLrOnPlateau, GoesOnAfterAResume) {
  for (const int stage : {0, 1, 3}) {
    const test::ScratchFolder scratch;
    const auto value = [](int i) { return i == 2 ? 1.0 : 3.0; };
    test::run_ranks(2, [&](comm::Communicator& ranks) {
      SmallNet model;
      const auto parts = start(model.ptr(), plateau_config(stage, /*patience=*/2), ranks);
      for (int i = 0; i < 7; ++i) {
        step(*parts.engine, model, i);
        parts.schedule->step(value(i));
      }
      EXPECT_EQ(parts.schedule->get_last_lr()[0], 0.01);
      parts.engine->save_checkpoint(scratch.path().string(), "seven");
      SmallNet other;
      const auto resumed = start(other.ptr(), plateau_config(stage, /*patience=*/2), ranks);
      resumed.engine->load_checkpoint(scratch.path().string());
      EXPECT_EQ(resumed.schedule->get_last_lr()[0], 0.01);
      EXPECT_EQ(resumed.schedule->plateau()->best, 1.0);
      for (int i = 7; i < 10; ++i) {
        for (const auto* run : {&parts, &resumed}) {
          step(*run->engine, run == &parts ? model : other, i);
          run->schedule->step(value(i));
        }
        EXPECT_EQ(resumed.schedule->get_last_lr(), parts.schedule->get_last_lr());
      }
      EXPECT_EQ(resumed.schedule->get_last_lr()[0], 0.005);
      EXPECT_EQ(largest_difference(parameters_of(*model), parameters_of(*other)), 0);
    });
  }
}

TEST(ReduceLrOnPlateau, AnInfiniteBestComesBack) {
  const test::ScratchFolder scratch;
  test::run_ranks(1, [&](comm::Communicator& ranks) {
    SmallNet model;
    const auto parts = start(model.ptr(), plateau_config(0), ranks);
    parts.schedule->step(-INFINITY);
    parts.engine->save_checkpoint(scratch.path().string(), "infinite");
    parts.schedule->load_plateau({});
    parts.engine->load_checkpoint(scratch.path().string());
    EXPECT_EQ(parts.schedule->plateau()->best, -INFINITY);
    EXPECT_EQ(parts.schedule->plateau()->values, 1);
  });
}

TEST(ReduceLrOnPlateau, BeginsAnewWithACheckpointOfAnotherSchedule) {
  const test::ScratchFolder scratch;
  test::run_ranks(1, [&](comm::Communicator& ranks) {
    SmallNet other;
    start(other.ptr(), small_config(0, 1), ranks).engine->save_checkpoint(scratch.path().string(), "other");
    SmallNet model;
    const auto parts = start(model.ptr(), plateau_config(0), ranks);
    parts.schedule->step(0.5);
    parts.engine->load_checkpoint(scratch.path().string());
    EXPECT_EQ(parts.schedule->plateau()->best, std::nullopt);
    EXPECT_EQ(parts.schedule->plateau()->values, 0);
  });
}

TEST(ReduceLrOnPlateau, OfAnOptimizerOfTheProgram) {
  test::run_ranks(1, [](comm::Communicator& ranks) {
    SmallNet model;
    nlohmann::ordered_json config = plateau_config(0, /*patience=*/0);
    config.erase("optimizer");
    const auto optimizer = std::make_shared<torch::optim::SGD>(model->parameters(), torch::optim::SGDOptions(0.5));
    const auto parts =
        initialize({.model = model.ptr(), .config = config, .optimizer = optimizer, .communicator = borrowed(ranks)});
    for (int i = 0; i < 3; ++i) {
      step(*parts.engine, model, i);
      parts.schedule->step(1.0);
    }
    EXPECT_EQ(learning_rates(*optimizer)[0], 0.125);
  });
}

// The config's takes the place of LibTorch's, which nobody can save.
TEST(ReduceLrOnPlateau, AgreesWithLibTorchsBesideAnOptimizerOfTheProgramAndComesBack) {
  const std::vector<float> values = {3, 2, 4, 5, 2.5, 1, 1, 1.5, 0.5, 0.7, 0.8, 0.9};
  const auto plain = std::make_shared<torch::optim::SGD>(std::vector<at::Tensor>{torch::zeros({1})}, 0.5);
  torch::optim::ReduceLROnPlateauScheduler libtorch(*plain, torch::optim::ReduceLROnPlateauScheduler::min,
                                                    /*factor=*/0.5, /*patience=*/1);
  std::vector<double> expected;
  for (const float value : values) {
    libtorch.step(value);
    expected.push_back(learning_rates(*plain)[0]);
  }
  EXPECT_LT(expected.back(), 0.5);
  const test::ScratchFolder scratch;
  test::run_ranks(1, [&](comm::Communicator& ranks) {
    std::vector<double> found;
    for (const size_t from : {size_t{0}, size_t{4}, size_t{8}}) {  // a run of four values, resumed twice
      SmallNet model;
      nlohmann::ordered_json config = plateau_config(0);
      config.erase("optimizer");
      const auto optimizer = std::make_shared<torch::optim::SGD>(model->parameters(), torch::optim::SGDOptions(0.5));
      const auto parts =
          initialize({.model = model.ptr(), .config = config, .optimizer = optimizer, .communicator = borrowed(ranks)});
      if (from > 0) parts.engine->load_checkpoint(scratch.path().string());
      for (size_t i = from; i < from + 4; ++i) {
        parts.schedule->step(values[i]);
        found.push_back(learning_rates(*optimizer)[0]);
      }
      parts.engine->save_checkpoint(scratch.path().string(), std::to_string(from));
    }
    EXPECT_EQ(found, expected);
  });
}

TEST(ReduceLrOnPlateau, AnotherScheduleTakesNoValue) {
  test::run_ranks(1, [](comm::Communicator& ranks) {
    SmallNet model;
    nlohmann::ordered_json config = small_config(0, 1);
    config["scheduler"] = {{"type", "WarmupLR"}};
    const auto parts = start(model.ptr(), config, ranks);
    EXPECT_THAT([&] { parts.schedule->step(1.0); }, ThrowsMessage<UsageError>(HasSubstr("ReduceLROnPlateau")));
    EXPECT_FALSE(parts.schedule->plateau());
    config["scheduler"] = {{"type", "ReduceLROnPlateau"}, {"params", {{"factor", 1.0}}}};
    EXPECT_THAT([&] { start(model.ptr(), config, ranks); },
                ThrowsMessage<ConfigError>(HasSubstr("scheduler.params.factor")));
  });
}

}  // namespace
}  // namespace ds::engine
