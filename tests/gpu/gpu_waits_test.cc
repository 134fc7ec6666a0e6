// What makes the host wait in a step: nothing, so that it stays ahead of the device. The simulated GPU counts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <barrier>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <regex>
#include <string>
#include <vector>

#include "comm/shared_memory/thread_group.h"
#include "core/check.h"
#include "dsengine/profiling.h"
#include "tests/gpu/device_run.h"
#include "tests/gpu/host_waits.h"
#include "tests/gpu/nccl_ranks.h"
#include "tests/support/scratch_folder.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using test::take_waits;
using test::text_of;
using test::Waits;

constexpr int kSteps = 5;

// Samples on the host.
struct Rows {
  static torch::data::Example<> get(size_t index) { return {sample(static_cast<int64_t>(index), 0)[0], at::Tensor()}; }
  static size_t size() { return 1000; }
};

// Of kSteps steps with batches of the engine's loader, after some that are not counted.
Waits waits_of_steps(const ordered_json& config, int world) {
  std::barrier all(world);
  Waits waits;
  const auto train = [&](comm::Communicator& ranks, at::Device device) {
    SmallNet model;
    const Initialized made = initialize({.model = model.ptr(),
                                         .config = config,
                                         .training_data = Rows(),
                                         .communicator = borrowed(ranks),
                                         .device = device.str()});
    DataLoader::Iterator batch = made.loader->begin();
    const auto make_steps = [&](int64_t steps) {  // nobody asks for a loss
      for (int64_t micro = 0; micro < steps * made.engine->gradient_accumulation_steps(); ++micro, ++batch) {
        made.engine->backward(model->loss(batch->data));
        made.engine->step();
      }
    };
    make_steps(3);
    take_waits(all, ranks.rank() == 0, waits);
    make_steps(kSteps);
    take_waits(all, ranks.rank() == 0, waits);
  };
  test::on_devices(world, train);
  return waits;
}

struct WaitsCell {
  int stage;
  int world;
  std::string precision = "bf16";
};

// The scale of fp16 grows in most steps: only the device knows the next one.
ordered_json waits_config(int stage, const std::string& precision) {
  ordered_json config = device_config(stage, precision);
  config["check_replicas"] = 2;  // the host reads it in the next step
  if (precision != "fp16") return config;
  config["fp16"]["initial_scale_power"] = 4;
  config["fp16"]["loss_scale_window"] = 1;
  return config;
}

class GpuWaits : public ::testing::TestWithParam<WaitsCell> {};

std::vector<WaitsCell> waits_cells() {
  std::vector<WaitsCell> cells;
  for (const char* precision : {"bf16", "fp16"}) {
    for (const int world : {1, 2}) {
      for (const int stage : {0, 1, 2, 3}) cells.push_back({stage, world, precision});
    }
  }
  return cells;
}

INSTANTIATE_TEST_SUITE_P(Grid, GpuWaits, ::testing::ValuesIn(waits_cells()), [](const auto& cell) {
  return cat("Stage", cell.param.stage, "Ranks", cell.param.world, cell.param.precision);
});

TEST_P(GpuWaits, NothingInAStepLetsTheHostWait) {
  if (!test::device_is_simulated()) GTEST_SKIP() << "waits of the host are counted by the simulated GPU";
  Waits waits = waits_of_steps(waits_config(GetParam().stage, GetParam().precision), GetParam().world);
  // What the step before told, which the device has long done: it has another forward and backward to do.
  EXPECT_LE(waits["an event"], kSteps * GetParam().world);
  waits.erase("an event");
  EXPECT_EQ(text_of(waits), "");
}

// Optimizers that need whole parameters: their norms and products stay on the device.
TEST(GpuWholeOptimizers, LetTheHostNotWait) {
  if (!test::device_is_simulated()) GTEST_SKIP() << "waits of the host are counted by the simulated GPU";
  for (const std::string type : {"Lamb", "Muon"}) {
    for (const WaitsCell& cell : std::vector<WaitsCell>{{0, 1}, {1, 2}, {2, 1, "fp16"}, {3, 2}}) {
      SCOPED_TRACE(cat(type, ", stage ", cell.stage, ", ranks ", cell.world));
      ordered_json config = waits_config(cell.stage, cell.precision);
      config["optimizer"] = {{"type", type}, {"params", {{"lr", 0.02}, {"weight_decay", 0.1}}}};
      config["zero_allow_untested_optimizer"] = true;
      Waits waits = waits_of_steps(config, cell.world);
      waits.erase("an event");
      EXPECT_EQ(text_of(waits), "");
    }
  }
}

TEST(GpuClipByValue, LetsTheHostNotWait) {
  if (!test::device_is_simulated()) GTEST_SKIP() << "waits of the host are counted by the simulated GPU";
  for (const char* precision : {"bf16", "fp16"}) {
    ordered_json config = waits_config(2, precision);
    config["gradient_clipping"] = 0.0;
    config["gradient_clip_by_value"] = 0.01;
    Waits waits = waits_of_steps(config, 1);
    waits.erase("an event");
    EXPECT_EQ(text_of(waits), "") << precision;
  }
}

// What a rank knows without others.
TEST(GpuUnusedParameters, AloneLetTheHostNotWait) {
  if (!test::device_is_simulated()) GTEST_SKIP() << "waits of the host are counted by the simulated GPU";
  ordered_json config = waits_config(2, "bf16");
  config["zero_optimization"]["ignore_unused_parameters"] = false;
  Waits waits = waits_of_steps(config, 1);
  waits.erase("an event");
  EXPECT_EQ(text_of(waits), "");
}

// A parameter that is frozen between steps stays as it is, by copies on the device.
TEST(GpuFrozenLater, StaysStillWithoutAWait) {
  if (!test::device_is_simulated()) GTEST_SKIP() << "waits of the host are counted by the simulated GPU";
  for (const int stage : {0, 1, 2}) {
    SCOPED_TRACE(cat("stage ", stage));
    const auto ranks = comm::ThreadGroup(1).communicator(0);
    SmallNet model;
    const auto engine = initialize({.model = model.ptr(),
                                    .config = device_config(stage, "bf16"),
                                    .communicator = borrowed(*ranks),
                                    .device = test::tested_device().str()})
                            .engine;
    const at::Tensor x = sample(0, 0).to(test::tested_device());
    const auto make_steps = [&](int64_t steps) {
      for (int64_t micro = 0; micro < steps * engine->gradient_accumulation_steps(); ++micro) {
        engine->backward(model->loss(x));
        engine->step();
      }
    };
    make_steps(2);  // momentum, which would move it
    model->last->weight.set_requires_grad(false);
    make_steps(1);
    const State before = copy_of(engine->fp32_state_dict());
    take_waits();
    make_steps(kSteps);
    Waits waits = take_waits();
    waits.erase("an event");
    EXPECT_EQ(text_of(waits), "");
    const State after = copy_of(engine->fp32_state_dict());
    EXPECT_TRUE(after.at("last.weight").equal(before.at("last.weight")));
    EXPECT_FALSE(after.at("first.weight").equal(before.at("first.weight")));
  }
}

// Times are those of the device, one step late.
TEST(GpuTimes, AreToldWithoutAWaitForTheRunningStep) {
  if (!test::device_is_simulated()) GTEST_SKIP() << "waits of the host are counted by the simulated GPU";
  ordered_json config = device_config(2, "bf16");
  config["wall_clock_breakdown"] = true;
  ::testing::internal::CaptureStderr();
  Waits waits = waits_of_steps(config, 1);
  const std::string text = ::testing::internal::GetCapturedStderr();
  waits.erase("an event");
  EXPECT_EQ(text_of(waits), "");
  const std::regex line("time \\(ms\\) \\| fwd: ([0-9.]+) \\| bwd: ([0-9.]+) .* step: ([0-9.]+)");
  int lines = 0;
  for (std::sregex_iterator found(text.begin(), text.end(), line); found != std::sregex_iterator(); ++found, ++lines) {
    EXPECT_GT(std::stod((*found)[1]) + std::stod((*found)[2]) + std::stod((*found)[3]), 0.0);
  }
  EXPECT_EQ(lines, 3 + kSteps - 1) << text;
}

// Operations between ranks are timed by events, which are read in a later step.
TEST(GpuCommsLog, TimesOperationsWithoutAWait) {
  if (!test::device_is_simulated()) GTEST_SKIP() << "waits of the host are counted by the simulated GPU";
  for (const int stage : {0, 2, 3}) {
    SCOPED_TRACE(cat("stage ", stage));
    ordered_json config = device_config(stage, "bf16");
    config["comms_logger"] = {{"enabled", true}};
    Waits waits = waits_of_steps(config, 2);
    EXPECT_LE(waits["an event"], kSteps * 2) << "as without the log";
    waits.erase("an event");
    EXPECT_EQ(text_of(waits), "");
  }
}

TEST(GpuCommsLog, CountsWhatIsSent) {
  if (const std::string why = test::missing_gpus(2); !why.empty()) GTEST_SKIP() << why;
  for (const int stage : {0, 2, 3}) {
    SCOPED_TRACE(cat("stage ", stage));
    test::on_gpus(2, [&](comm::Communicator& ranks, at::Device device) {
      SmallNet model;
      ordered_json config = device_config(stage, "bf16");
      config["comms_logger"] = {{"enabled", true}};
      const auto engine =
          initialize({.model = model.ptr(), .config = config, .communicator = borrowed(ranks), .device = device.str()})
              .engine;
      for (int64_t micro = 0; micro < 2 * engine->gradient_accumulation_steps(); ++micro) {
        engine->backward(model->loss(sample(micro, ranks.rank()).to(device)));
        engine->step();
      }
      engine->synchronize_parameters();
      double sent = 0;
      for (const CommsStatistics& one : comms_statistics(*engine)) {
        const double factor = one.operation == "all_reduce" ? 1 : 0.5;  // of two ranks
        sent += factor * static_cast<double>(one.count * one.message_bytes);
        EXPECT_GE(one.total_ms, 0);
      }
      EXPECT_NEAR(sent, static_cast<double>(engine->comm_bytes_sent()), 1.0);
    });
  }
}

struct SkippedRun {
  std::vector<double> losses;
  State weights;
  std::vector<double> rates;
  int64_t skipped = 0;
  std::string said;  // warnings
};

// The fourth of eight steps has a gradient that is not finite. `asks`: whether each step was applied is asked at once.
SkippedRun run_with_a_bad_step(at::Device device, int stage, bool asks) {
  constexpr int kBadStep = 3;
  ordered_json config = device_config(stage, "bf16");
  config["scheduler"] = {{"type", "WarmupLR"}, {"params", {{"warmup_num_steps", 20}, {"warmup_max_lr", 0.02}}}};
  const auto ranks = comm::ThreadGroup(1).communicator(0);
  SmallNet model;
  const auto engine =
      initialize({.model = model.ptr(), .config = config, .communicator = borrowed(*ranks), .device = device.str()})
          .engine;
  SkippedRun run;
  std::vector<at::Tensor> losses;
  ::testing::internal::CaptureStderr();
  for (int step = 0; step < 8; ++step) {
    for (int64_t micro = 0; micro < 2; ++micro) {
      engine->name_batch(cat("batch ", step));
      losses.push_back(model->loss(sample(2 * step + micro, 0).to(device)));
      engine->backward(step == kBadStep ? losses.back() * std::numeric_limits<float>::infinity() : losses.back());
      engine->step();
    }
    if (!asks) continue;
    EXPECT_EQ(engine->was_step_applied(), step != kBadStep);
    EXPECT_EQ(std::isfinite(engine->get_global_grad_norm().value()), step != kBadStep);
  }
  run.weights = copy_of(engine->fp32_state_dict());
  run.said = ::testing::internal::GetCapturedStderr();
  for (const at::Tensor& loss : losses) run.losses.push_back(loss.item<double>());
  run.rates = engine->get_lr();
  run.skipped = engine->skipped_steps();
  return run;
}

class GpuLateSteps : public ::testing::TestWithParam<int> {};

INSTANTIATE_TEST_SUITE_P(Stages, GpuLateSteps, ::testing::Values(0, 1, 2, 3));

TEST_P(GpuLateSteps, ThatWasSkippedIsTakenBack) {
  const SkippedRun expected = run_with_a_bad_step(at::kCPU, GetParam(), true);
  EXPECT_EQ(expected.skipped, 1);
  for (const bool asks : {false, true}) {
    const SkippedRun found = run_with_a_bad_step(test::tested_device(), GetParam(), asks);
    EXPECT_EQ(found.skipped, 1);
    EXPECT_EQ(found.rates, expected.rates);
    expect_same_losses(found.losses, expected.losses, tolerance_of("bf16"));
    EXPECT_LT(largest_difference(found.weights, expected.weights), 0.02);
    EXPECT_THAT(found.said, ::testing::HasSubstr("step 4 is skipped"));
    EXPECT_THAT(found.said, ::testing::HasSubstr("loss of micro-batch 0 (batch 3) is inf"));
  }
}

// Two ranks of which one does `apart` before the last micro-batch of a step. On the CPU that step throws; here the
// next.
void expect_an_error_one_step_later(const std::string& precision, const std::function<void(Engine&, SmallNet&)>& apart,
                                    const std::string& said, bool saves = false) {
  SCOPED_TRACE(precision);
  const test::ScratchFolder folder;
  test::on_gpus(2, [&](comm::Communicator& ranks, at::Device device) {
    SmallNet model;
    const auto engine = initialize({.model = model.ptr(),
                                    .config = device_config(0, precision),
                                    .communicator = borrowed(ranks),
                                    .device = device.str()})
                            .engine;
    const auto step = [&](bool parts) {
      for (int64_t micro = 0; micro < 2; ++micro) {
        engine->backward(model->loss(sample(micro, ranks.rank()).to(device)));
        if (parts && micro == 1) apart(*engine, model);
        engine->step();
      }
    };
    step(false);
    EXPECT_NO_THROW(step(ranks.rank() == 1));
    engine->synchronize_parameters();  // which a rank may do alone: judges nothing
    const auto next = [&] {
      if (saves) engine->save_16bit_model(folder.path().string(), "parted.safetensors");
      step(false);
    };
    EXPECT_THAT(next, ::testing::ThrowsMessage<UsageError>(::testing::HasSubstr(said)));
  });
}

TEST(GpuLateStep, RanksThatPartAreAnErrorOneStepLater) {
  if (const std::string why = test::missing_gpus(2); !why.empty()) GTEST_SKIP() << why;
  const auto change = [](Engine&, SmallNet& model) {
    const at::NoGradGuard no_grad;
    model->last->bias.mul_(2.0);
  };
  const auto clip = [](Engine& engine, SmallNet&) { engine.clip_grad_norm_(1e-3); };
  const auto decay = [](Engine& engine, SmallNet&) { engine.optimizer()->groups().front().weight_decay = 0.5; };
  for (const char* precision : {"bf16", "fp32"}) {
    expect_an_error_one_step_later(precision, change, "changed last.bias");
    expect_an_error_one_step_later(precision, decay, "weight_decay of parameter group 0");
    expect_an_error_one_step_later(precision, clip, "changed gradients");
    expect_an_error_one_step_later(precision, change, "changed last.bias", /*saves=*/true);
  }
}

// What two ranks say of a step in which one of them changed a parameter alone, when `then` comes after it.
std::string said_of_parted_ranks(const std::function<void(Engine&)>& then) {
  ::testing::internal::CaptureStderr();
  test::on_gpus(2, [&](comm::Communicator& ranks, at::Device device) {
    SmallNet model;
    const auto engine = initialize({.model = model.ptr(),
                                    .config = device_config(0, "bf16"),
                                    .communicator = borrowed(ranks),
                                    .device = device.str()})
                            .engine;
    for (int64_t micro = 0; micro < 2; ++micro) {
      engine->backward(model->loss(sample(micro, ranks.rank()).to(device)));
      if (micro == 1 && ranks.rank() == 1) {
        const at::NoGradGuard no_grad;
        model->last->bias.mul_(2.0);
      }
      engine->step();
    }
    then(*engine);
    at::zeros({1}, device).item<float>();  // the device has told of it by now
  });
  return ::testing::internal::GetCapturedStderr();
}

TEST(GpuLateStep, ThatPartsIsToldWhereNobodyJudgesIt) {
  if (const std::string why = test::missing_gpus(2); !why.empty()) GTEST_SKIP() << why;
  const auto expected = ::testing::HasSubstr("step 1: the ranks differ");
  EXPECT_THAT(said_of_parted_ranks([](Engine& engine) { engine.fp32_state_dict(); }), expected);
  EXPECT_THAT(said_of_parted_ranks([](Engine& engine) { engine.module_state_dict(); }), expected);
  EXPECT_THAT(said_of_parted_ranks([](Engine&) {}), expected) << "the program ends";
}

TEST(GpuLateStep, IsJudgedAfterALoadThatFails) {
  if (const std::string why = test::missing_gpus(2); !why.empty()) GTEST_SKIP() << why;
  const test::ScratchFolder folder;
  const std::string said = said_of_parted_ranks([&](Engine& engine) {
    const std::string nowhere = folder / "no_such_checkpoint";
    EXPECT_FALSE(engine.load_checkpoint(nowhere));
    EXPECT_ANY_THROW(engine.load_checkpoint(nowhere, "no_such_tag"));
    EXPECT_THAT([&] { engine.save_16bit_model(folder.path().string(), "parted.safetensors"); },
                ::testing::ThrowsMessage<UsageError>(::testing::HasSubstr("changed last.bias")));
  });
  EXPECT_THAT(said, ::testing::Not(::testing::HasSubstr("the ranks differ"))) << "it was thrown";
}

// SmallNet on so many GPUs, whose step() refuses one without gradients of `last`.
struct StrictRun {
  StrictRun(comm::Communicator& ranks, at::Device on) : rank(ranks.rank()), device(on) {
    ordered_json config = device_config(0, "bf16");
    config["zero_optimization"]["ignore_unused_parameters"] = false;
    engine =
        initialize({.model = model.ptr(), .config = config, .communicator = borrowed(ranks), .device = device.str()})
            .engine;
  }
  void backward(bool whole, double factor = 1.0) {
    const at::Tensor x = sample(0, rank).to(device);
    const at::Tensor hidden = model->first(x.to(model->first->weight.scalar_type()));
    engine->backward((whole ? model->loss(x) : hidden.pow(2).mean()) * factor);
  }
  void step(bool whole, double factor = 1.0) {
    for (int64_t micro = 0; micro < 2; ++micro) {
      backward(whole, factor);
      engine->step();
    }
  }

  int rank;
  at::Device device;
  SmallNet model;
  std::shared_ptr<Engine> engine;
};

TEST(GpuLateStep, ThatWasSkippedIsTakenBackBeforeOneThatFails) {
  const auto ranks = comm::ThreadGroup(1).communicator(0);
  StrictRun run(*ranks, test::tested_device());
  run.step(true);
  run.step(true, std::numeric_limits<double>::infinity());
  EXPECT_THROW(run.step(false), UsageError);
  EXPECT_EQ(run.engine->skipped_steps(), 1);
  EXPECT_EQ(run.engine->optimizer()->step_count(), 1);
}

TEST(GpuLateStep, ThatFailedHasPartedNobody) {
  if (const std::string why = test::missing_gpus(2); !why.empty()) GTEST_SKIP() << why;
  test::on_gpus(2, [&](comm::Communicator& ranks, at::Device device) {
    StrictRun run(ranks, device);
    run.step(true);
    run.backward(false);
    run.engine->step();
    run.backward(false);
    if (ranks.rank() == 1) run.engine->clip_grad_norm_(1e-3);
    EXPECT_THAT([&] { run.engine->step(); }, ::testing::ThrowsMessage<UsageError>(::testing::HasSubstr("no gradient")));
    EXPECT_THAT([&] { run.step(true); },
                ::testing::ThrowsMessage<UsageError>(::testing::HasSubstr("changed gradients")));
    EXPECT_NO_THROW(run.step(true)) << "nothing was updated with those gradients";
  });
}

}  // namespace
}  // namespace ds::engine
