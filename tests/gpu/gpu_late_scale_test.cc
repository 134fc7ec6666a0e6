// Steps whose loss scale only the device knows: the same training as on the CPU.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "comm/shared_memory/thread_group.h"
#include "core/text.h"
#include "optim/loss_scaler.h"
#include "tests/gpu/device_run.h"
#include "tests/gpu/nccl_ranks.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;

// fp16 with gradients that are not finite in steps 3, 4 and 7.
struct ScaledRun {
  std::vector<double> losses;
  std::vector<double> scales;
  State weights;
  std::vector<double> rates;
  int64_t skipped = 0;
};

// They are those of the last rank only. `asks`: for the loss scale, between micro-batches and after each step.
ScaledRun run_with_overflows(comm::Communicator& ranks, at::Device device, const ordered_json& fp16, int stage,
                             bool asks) {
  ordered_json config = device_config(stage, "fp16");
  config["fp16"].update(fp16);
  config["scheduler"] = {{"type", "WarmupLR"}, {"params", {{"warmup_num_steps", 20}, {"warmup_max_lr", 0.02}}}};
  SmallNet model;
  const auto engine =
      initialize({.model = model.ptr(), .config = config, .communicator = borrowed(ranks), .device = device.str()})
          .engine;
  ScaledRun run;
  std::vector<at::Tensor> losses;
  for (int step = 0; step < 10; ++step) {
    const bool bad = (step == 2 || step == 3 || step == 6) && ranks.rank() == ranks.size() - 1;
    for (int64_t micro = 0; micro < 2; ++micro) {
      losses.push_back(model->loss(sample(2 * step + micro, ranks.rank()).to(device)));
      if (asks && micro == 1) run.scales.push_back(engine->loss_scale());
      engine->backward(bad ? losses.back() * std::numeric_limits<float>::infinity() : losses.back());
      engine->step();
    }
    if (asks) run.scales.push_back(engine->loss_scale());
  }
  run.weights = copy_of(engine->fp32_state_dict());
  for (const at::Tensor& loss : losses) run.losses.push_back(loss.item<double>());
  run.rates = engine->get_lr();
  run.skipped = engine->skipped_steps();
  if (!asks) run.scales.push_back(engine->loss_scale());
  return run;
}

std::vector<ScaledRun> run_on_the_cpu(int world, const ordered_json& fp16, int stage) {
  std::vector<ScaledRun> runs(static_cast<size_t>(world));
  test::run_ranks(world, [&](comm::Communicator& ranks) {
    runs[static_cast<size_t>(ranks.rank())] = run_with_overflows(ranks, at::kCPU, fp16, stage, true);
  });
  return runs;
}

// Stage, ranks.
class GpuLateScale : public ::testing::TestWithParam<std::tuple<int, int>> {};

INSTANTIATE_TEST_SUITE_P(StagesAndRanks, GpuLateScale,
                         ::testing::Combine(::testing::Values(0, 1, 2, 3), ::testing::Values(1, 2)));

// Scales that grow and fall in every step, those that fall at the second overflow, those near the minimum, and a
// fixed one.
TEST_P(GpuLateScale, IsThatOfTheCpu) {
  const std::vector<ordered_json> sections = {{{"loss_scale_window", 1}, {"hysteresis", 1}},
                                              {{"loss_scale_window", 2}, {"hysteresis", 2}, {"initial_scale_power", 4}},
                                              {{"loss_scale_window", 1}, {"hysteresis", 1}, {"initial_scale_power", 2}},
                                              {{"loss_scale", 64}}};
  const auto [stage, world] = GetParam();
  if (const std::string why = world > 1 ? test::missing_gpus(world) : ""; !why.empty()) GTEST_SKIP() << why;
  for (const ordered_json& fp16 : sections) {
    SCOPED_TRACE(fp16.dump());
    const std::vector<ScaledRun> runs = run_on_the_cpu(world, fp16, stage);
    for (const bool asks : {false, true}) {
      test::on_devices(world, [&, stage = stage](comm::Communicator& ranks, at::Device device) {
        const ScaledRun& expected = runs[static_cast<size_t>(ranks.rank())];
        const ScaledRun found = run_with_overflows(ranks, device, fp16, stage, asks);
        EXPECT_EQ(expected.skipped, 3);
        EXPECT_EQ(found.skipped, 3);
        EXPECT_EQ(found.rates, expected.rates);
        EXPECT_EQ(found.scales.back(), expected.scales.back());
        if (asks) EXPECT_EQ(found.scales, expected.scales);
        expect_same_losses(found.losses, expected.losses, tolerance_of("fp16"));
        EXPECT_LT(largest_difference(found.weights, expected.weights), 0.02);
      });
    }
  }
}

// backward_mean(): of several ranks only the device knows the count by which a late step divides.
TEST_P(GpuLateScale, DividesByTheCountOfAllRanks) {
  const auto [stage, world] = GetParam();
  if (const std::string why = world > 1 ? test::missing_gpus(world) : ""; !why.empty()) GTEST_SKIP() << why;
  for (const std::string precision : {"fp32", "fp16"}) {
    SCOPED_TRACE(precision);
    const auto run = [&, stage = stage](comm::Communicator& ranks, at::Device device, double& norm) {
      ordered_json config = device_config(stage, precision);
      config["non_finite_gradients"] = "skip";
      SmallNet model;
      const auto engine =
          initialize({.model = model.ptr(), .config = config, .communicator = borrowed(ranks), .device = device.str()})
              .engine;
      for (int64_t micro = 0; micro < 6; ++micro) {
        const auto count = static_cast<double>((micro + 3 * ranks.rank()) % 4);
        engine->backward_mean(model->loss(sample(micro, ranks.rank()).to(device)) * count, count);
        engine->step();
      }
      norm = engine->get_global_grad_norm().value();
      return copy_of(engine->fp32_state_dict());
    };
    std::vector<State> expected(static_cast<size_t>(world));
    double expected_norm = 0;
    test::run_ranks(world, [&](comm::Communicator& ranks) {
      double norm = 0;
      expected[static_cast<size_t>(ranks.rank())] = run(ranks, at::kCPU, norm);
      if (ranks.rank() == 0) expected_norm = norm;
    });
    test::on_devices(world, [&](comm::Communicator& ranks, at::Device device) {
      double norm = 0;
      const State found = run(ranks, device, norm);
      const double tolerance = tolerance_of(precision);
      EXPECT_NEAR(norm, expected_norm, tolerance * expected_norm);
      EXPECT_LT(largest_difference(found, expected[static_cast<size_t>(ranks.rank())]), tolerance);
    });
  }
}

// The moving average of the weights leaves out the steps that the device skips, which the host learns one step later.
TEST_P(GpuLateScale, AverageLeavesOutWhatTheDeviceSkips) {
  const auto [stage, world] = GetParam();
  if (const std::string why = world > 1 ? test::missing_gpus(world) : ""; !why.empty()) GTEST_SKIP() << why;
  constexpr double kDecay = 0.75;
  test::on_devices(world, [&, stage = stage](comm::Communicator& ranks, at::Device device) {
    ordered_json config = device_config(stage, "fp16");
    config["gradient_accumulation_steps"] = 1;
    SmallNet model;
    const auto engine = initialize({.model = model.ptr(),
                                    .config = config,
                                    .ema = {.decay = kDecay},
                                    .communicator = borrowed(ranks),
                                    .device = device.str()})
                            .engine;
    State expected = copy_of(engine->fp32_state_dict());
    for (auto& [name, value] : expected) value = value.to(torch::kDouble);
    for (int64_t step = 0; step < 8; ++step) {
      const bool bad = (step == 2 || step == 3 || step == 6) && ranks.rank() == ranks.size() - 1;
      const at::Tensor loss = model->loss(sample(step, ranks.rank()).to(device));
      engine->backward(bad ? loss * std::numeric_limits<float>::infinity() : loss);
      engine->step();
      if (step == 2) continue;  // the host learns of it in the next step
      const State weights = copy_of(engine->fp32_state_dict());
      if (!engine->was_step_applied()) continue;
      for (auto& [name, value] : expected) {
        value = kDecay * value + (1 - kDecay) * weights.at(name).to(torch::kDouble);
      }
    }
    EXPECT_EQ(ema_updates(engine), 5);
    EXPECT_EQ(engine->skipped_steps(), 3);
    EXPECT_LT(largest_difference(copy_of(ema_state_dict(engine)), expected), 1e-6);
  });
}

// A scale that begins below its minimum: the second step makes the minimum of it, whether it is good or not. What
// nobody has asked until the third shows in the norm of that one.
TEST(GpuLateScale, RisesToItsMinimum) {
  const auto norm_of_third = [](at::Device device) {
    ordered_json config = device_config(0, "fp16");
    config["fp16"].update({{"loss_scale_window", 1}, {"initial_scale_power", 2}, {"min_loss_scale", 8}});
    const auto ranks = comm::ThreadGroup(1).communicator(0);
    SmallNet model;
    const auto engine =
        initialize({.model = model.ptr(), .config = config, .communicator = borrowed(*ranks), .device = device.str()})
            .engine;
    for (int64_t micro = 0; micro < 6; ++micro) {
      engine->backward(model->loss(sample(micro, 0).to(device)));
      engine->step();
    }
    return engine->get_global_grad_norm().value();
  };
  const double expected = norm_of_third(at::kCPU);
  EXPECT_NEAR(norm_of_third(test::tested_device()), expected, 0.05 * expected);
}

// The error comes from the step itself: where the scale could not fall, the host waits.
TEST(GpuLateScale, ThatCannotFallIsAnErrorOfItsStep) {
  const auto ranks = comm::ThreadGroup(1).communicator(0);
  ordered_json config = device_config(2, "fp16");
  config["fp16"].update({{"initial_scale_power", 3}, {"hysteresis", 1}, {"min_loss_scale", 4}});
  SmallNet model;
  const auto engine = initialize({.model = model.ptr(),
                                  .config = config,
                                  .communicator = borrowed(*ranks),
                                  .device = test::tested_device().str()})
                          .engine;
  const auto step = [&](double factor) {
    for (int64_t micro = 0; micro < 2; ++micro) {
      engine->backward(model->loss(sample(micro, 0).to(test::tested_device())) * factor);
      engine->step();
    }
  };
  const double infinite = std::numeric_limits<double>::infinity();
  step(1.0);
  step(infinite);  // the scale falls from 8 to 4
  EXPECT_THROW(step(infinite), optimizers::LossScaleError);
  EXPECT_EQ(engine->skipped_steps(), 2);
  EXPECT_EQ(engine->loss_scale(), 4.0);
  step(1.0);
  EXPECT_TRUE(engine->was_step_applied());
}

// The loss scale of a checkpoint that is written right after a step that was skipped.
TEST(GpuLateScale, IsInACheckpoint) {
  const test::ScratchFolder scratch;
  const std::string folder = scratch / "late_scale";
  const auto ranks = comm::ThreadGroup(1).communicator(0);
  ordered_json config = device_config(0, "fp16");
  const auto start = [&](SmallNet& model) {
    return initialize({.model = model.ptr(),
                       .config = config,
                       .communicator = borrowed(*ranks),
                       .device = test::tested_device().str()})
        .engine;
  };
  const auto step = [&](SmallNet& model, Engine& engine, double factor) {
    for (int64_t micro = 0; micro < 2; ++micro) {
      engine.backward(model->loss(sample(micro, 0).to(test::tested_device())) * factor);
      engine.step();
    }
  };
  SmallNet model;
  const auto engine = start(model);
  step(model, *engine, std::numeric_limits<double>::infinity());
  engine->save_checkpoint(folder, "one");
  EXPECT_EQ(engine->loss_scale(), 128.0);
  step(model, *engine, std::numeric_limits<double>::infinity());
  ASSERT_TRUE(engine->load_checkpoint(folder, "one"));  // what the last step told goes with it
  EXPECT_EQ(engine->loss_scale(), 128.0);
  SmallNet other;
  const auto resumed = start(other);
  ASSERT_TRUE(resumed->load_checkpoint(folder, "one"));
  EXPECT_EQ(resumed->loss_scale(), 128.0);
  step(other, *resumed, 1.0);
  EXPECT_TRUE(resumed->was_step_applied());
}

}  // namespace
}  // namespace ds::engine
