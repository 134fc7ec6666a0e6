// Counters, accessors, and what the engine says to wrong use.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "core/check.h"
#include "tests/model/small_run.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using test::run_ranks;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::ThrowsMessage;

TEST(EngineUsage, CountersFollowTheMicroBatches) {
  run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), small_config(1, 3), communicator).engine;
    for (int64_t micro = 0; micro < 7; ++micro) {
      EXPECT_EQ(engine->is_gradient_accumulation_boundary(), micro % 3 == 2);
      engine->backward(model->loss(sample(micro, communicator.rank())));
      engine->step();
      EXPECT_EQ(engine->was_step_applied(), micro % 3 == 2);
    }
    EXPECT_EQ(engine->micro_steps(), 7);
    EXPECT_EQ(engine->global_steps(), 2);
    EXPECT_EQ(engine->global_samples(), 2 * 4 * 3 * 2);
    EXPECT_EQ(engine->train_batch_size(), 4 * 3 * 2);
    EXPECT_EQ(engine->world_size(), 2);
    EXPECT_EQ(engine->dp_world_size(), 2);
    EXPECT_EQ(engine->global_rank(), communicator.rank());
    EXPECT_EQ(engine->zero_optimization_stage(), 1);
    EXPECT_EQ(engine->get_type(), "AdamW");
    EXPECT_EQ(engine->device(), at::Device(at::kCPU));
  });
}

TEST(EngineUsage, BackwardReturnsTheLossOfTheMicroBatchOverTheAccumulation) {
  run_ranks(1, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), small_config(0, 4), communicator).engine;
    const at::Tensor loss = model->loss(sample(0, 0));
    const at::Tensor returned = engine->backward(loss, /*retain_graph=*/true);
    EXPECT_FLOAT_EQ(returned.item<float>(), loss.item<float>() / 4);
    EXPECT_FALSE(returned.requires_grad());
    EXPECT_FLOAT_EQ(engine->backward(loss, false, /*scale_wrt_gas=*/false).item<float>(), loss.item<float>());
  });
}

TEST(EngineUsage, ADeclaredBoundaryOverridesTheCount) {
  const State expected = TorchRun{.world = 2, .accumulation = 2, .steps = 1}.train_adamw();
  run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), small_config(1, 2), communicator).engine;
    engine->set_gradient_accumulation_boundary(false);
    engine->backward(model->loss(sample(0, communicator.rank())));
    engine->step();
    engine->set_gradient_accumulation_boundary(true);
    engine->backward(model->loss(sample(1, communicator.rank())));
    engine->step();
    EXPECT_EQ(engine->global_steps(), 1);
    EXPECT_LT(largest_difference(copy_of(engine->fp32_state_dict()), expected), 2e-6);
  });
}

// The losses of an update of fewer micro-batches were divided by more: said once, and not where the program divides.
TEST(EngineUsage, AnUpdateOfFewerMicroBatchesIsSaid) {
  run_ranks(1, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), small_config(1, 4), communicator).engine;
    const auto said = [&](bool scale_wrt_gas) {
      testing::internal::CaptureStderr();
      engine->set_gradient_accumulation_boundary(true);
      engine->backward(model->loss(sample(0, 0)), /*retain_graph=*/false, scale_wrt_gas);
      engine->step();
      return testing::internal::GetCapturedStderr();
    };
    EXPECT_THAT(said(false), Not(HasSubstr("micro-batches")));
    EXPECT_THAT(said(true), AllOf(HasSubstr("the update is made of 1 of 4 micro-batches"), HasSubstr("1/4")));
    EXPECT_THAT(said(true), Not(HasSubstr("micro-batches")));
    EXPECT_EQ(engine->global_steps(), 3);
  });
}

TEST(EngineUsage, ZeroGradDropsTheRunningAccumulation) {
  const State expected = TorchRun{.world = 2, .steps = 1}.train_adamw();
  for (const int stage : {0, 1, 2, 3}) {
    run_ranks(2, [&](comm::Communicator& communicator) {
      SmallNet model;
      const auto engine = start(model.ptr(), small_config(stage, 1), communicator).engine;
      engine->backward(model->loss(sample(5, communicator.rank())));
      engine->zero_grad();
      engine->backward(model->loss(sample(0, communicator.rank())));
      engine->step();
      EXPECT_LT(largest_difference(copy_of(engine->fp32_state_dict()), expected), 2e-6) << "stage " << stage;
    });
  }
}

TEST(EngineUsage, AnAccumulationThatZeroGradDropsStartsAnew) {
  const State expected = TorchRun{.world = 2, .accumulation = 3, .steps = 1}.train_adamw();
  for (const int stage : {0, 1, 2, 3}) {
    run_ranks(2, [&](comm::Communicator& communicator) {
      SmallNet model;
      const auto engine = start(model.ptr(), small_config(stage, 3), communicator).engine;
      for (int64_t micro : {7, 8}) {
        engine->backward(model->loss(sample(micro, communicator.rank())));
        engine->step();
      }
      engine->zero_grad();
      EXPECT_EQ(engine->micro_steps(), 0);
      EXPECT_LT(largest_difference(train(*engine, model, 1), expected), 2e-6) << "stage " << stage;
      EXPECT_EQ(engine->global_steps(), 1);
      EXPECT_EQ(engine->micro_steps(), 3);
    });
  }
}

TEST(EngineUsage, WhatRanksAreGivenHasToBeTheSame) {
  struct Numbers {
    int64_t length;
    size_t size() const { return static_cast<size_t>(length); }
    torch::data::Example<> get(size_t /*index*/) { return {torch::zeros({6}), torch::zeros({1})}; }
  };
  run_ranks(2, [&](comm::Communicator& communicator) {
    const auto begin = [&](int64_t samples, bool schedule) {
      SmallNet model;
      InitializeOptions options{.model = model.ptr(), .config = small_config(1, 1)};
      options.communicator = borrowed(communicator);
      if (samples > 0) options.training_data = Numbers{samples};
      if (schedule) options.lr_scheduler = [](int64_t) { return 0.5; };
      return initialize(std::move(options)).engine;
    };
    const bool first = communicator.rank() == 0;
    EXPECT_THAT([&] { begin(first ? 16 : 24, false); },
                ThrowsMessage<CommError>(AllOf(HasSubstr(".training_data"), HasSubstr("16 samples on rank 0"),
                                               HasSubstr("24 samples on rank 1"))));
    EXPECT_THAT([&] { begin(first ? 16 : 0, false); },
                ThrowsMessage<CommError>(AllOf(HasSubstr(".training_data"), HasSubstr("none on rank 1"))));
    EXPECT_THAT([&] { begin(16, first); },
                ThrowsMessage<CommError>(AllOf(HasSubstr(".lr_scheduler"), HasSubstr("none on rank 1"))));
    EXPECT_EQ(begin(16, true)->get_lr(), std::vector<double>{0.5 * 0.02});
  });
}

// "overrides the config's"
TEST(EngineUsage, AClientOptimizerTakesThePlaceOfOneThatCompresses) {
  for (const char* type : {"OneBitAdam", "OneBitLamb", "ZeroOneAdam"}) {
    run_ranks(2, [&](comm::Communicator& communicator) {
      SmallNet model;
      const auto sgd = std::make_shared<torch::optim::SGD>(model->parameters(), 0.1);
      ordered_json config = small_config(0, 1);
      config["optimizer"] = {{"type", type}, {"params", {{"lr", 0.02}}}};
      const auto engine =
          initialize({.model = model.ptr(), .config = config, .optimizer = sgd, .communicator = borrowed(communicator)})
              .engine;
      SmallNet plain;
      torch::optim::SGD optimizer(plain->parameters(), 0.1);
      const State expected = TorchRun{.world = 2, .steps = 2}.train(plain, optimizer);
      EXPECT_LT(largest_difference(train(*engine, model, 2), expected), 2e-6) << type;
    });
  }
}

TEST(EngineUsage, AChangedAccumulationCountsFromTheLastUpdate) {
  run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), small_config(1, 1), communicator).engine;
    const auto micro_batch = [&](int64_t index) {
      engine->backward(model->loss(sample(index, communicator.rank())));
      engine->step();
      return engine->was_step_applied();
    };
    EXPECT_TRUE(micro_batch(0));
    engine->set_train_batch_size(24);
    EXPECT_FALSE(micro_batch(1));
    EXPECT_THAT([&] { engine->set_train_batch_size(8); },
                ThrowsMessage<UsageError>(HasSubstr("after 1 of 3 micro-batches")));
    EXPECT_FALSE(micro_batch(2));
    EXPECT_TRUE(micro_batch(3));
  });
}

TEST(EngineUsage, BatchSizesCanChangeBetweenSteps) {
  run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), small_config(0, 1), communicator).engine;
    engine->set_train_batch_size(24);
    EXPECT_EQ(engine->gradient_accumulation_steps(), 3);
    EXPECT_THAT([&] { engine->set_train_batch_size(20); },
                ThrowsMessage<UsageError>(AllOf(HasSubstr("multiple of 8"), HasSubstr("found 20"))));
    engine->set_train_micro_batch_size(2);
    EXPECT_EQ(engine->train_batch_size(), 12);
  });
}

TEST(EngineUsage, LoaderScheduleAndOptimizerComeByStructuredBinding) {
  struct Numbers {
    torch::data::Example<> get(size_t index) const {
      return {torch::full({6}, static_cast<double>(index) * 0.01), torch::tensor({0})};
    }
    size_t size() const { return 32; }
  };
  ordered_json config = small_config(2, 1);
  config["scheduler"] = {{"type", "WarmupLR"}, {"params", {{"warmup_max_lr", 0.1}, {"warmup_num_steps", 4}}}};
  run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    auto [engine, optimizer, loader, schedule] = initialize(
        {.model = model.ptr(), .config = config, .training_data = Numbers{}, .communicator = borrowed(communicator)});
    ASSERT_NE(loader, nullptr);
    EXPECT_EQ(loader->size(), 4);
    std::vector<double> rates;
    for (Batch& batch : *loader) {
      EXPECT_EQ(batch.data.sizes(), at::IntArrayRef({4, 6}));
      rates.push_back(engine->get_lr().front());
      engine->backward(model->loss(batch.data));
      engine->step();
    }
    EXPECT_EQ(rates.size(), 4u);
    EXPECT_LT(rates[1], rates[3]);
    EXPECT_EQ(schedule->last_batch_iteration(), 3);
    EXPECT_EQ(optimizer->name(), "AdamW");
  });
}

TEST(EngineUsage, AProgramsOwnScheduleScalesTheRate) {
  run_ranks(1, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = initialize({.model = model.ptr(),
                                    .config = small_config(0, 1),
                                    .lr_scheduler = [](int64_t k) { return 1.0 / static_cast<double>(k + 1); },
                                    .communicator = borrowed(communicator)})
                            .engine;
    for (int64_t k = 0; k < 3; ++k) {
      EXPECT_DOUBLE_EQ(engine->get_lr().front(), 0.02 / static_cast<double>(k + 1));
      engine->backward(model->loss(sample(k, 0)));
      engine->step();
    }
  });
}

TEST(EngineUsage, ATorchScheduleOfTheConfigMayStartLater) {
  ordered_json config = small_config(0, 1);
  config["scheduler"] = {{"type", "StepLR"},
                         {"params", {{"step_size", 2}, {"gamma", 0.5}, {"last_batch_iteration", 2}}}};
  run_ranks(1, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine =
        initialize({.model = model.ptr(), .config = config, .communicator = borrowed(communicator)}).engine;
    std::vector<double> rates;
    for (int64_t k = 0; k < 4; ++k) {
      rates.push_back(engine->get_lr().front());
      engine->backward(model->loss(sample(k, 0)));
      engine->step();
    }
    // As from its fourth step on.
    EXPECT_THAT(rates, ::testing::ElementsAre(0.02 / 2, 0.02 / 4, 0.02 / 4, 0.02 / 8));
  });
}

TEST(EngineUsage, MonitorsWriteOneEventAStep) {
  const std::filesystem::path folder = std::filesystem::temp_directory_path() / cat("ds_engine_monitor_", ::getpid());
  ordered_json config = small_config(0, 1);
  config["csv_monitor"] = {{"enabled", true}, {"output_path", folder.string()}, {"job_name", "job"}};
  run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), config, communicator).engine;
    train(*engine, model, 3);
  });
  std::ifstream file(folder / "job" / "Train_Samples_lr.csv");
  int lines = 0;
  for (std::string line; std::getline(file, line);) ++lines;
  EXPECT_EQ(lines, 4);  // a header and three steps, by rank 0 alone
  std::filesystem::remove_all(folder);
}

TEST(EngineUsage, ABreakdownAndADumpAreLoggedByRankZeroAlone) {
  ordered_json config = small_config(1, 1);
  config["memory_breakdown"] = true;
  config["wall_clock_breakdown"] = true;
  config["dump_state"] = true;
  ::testing::internal::CaptureStderr();
  run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    train(*start(model.ptr(), config, communicator).engine, model, 1);
  });
  const std::string text = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(text, HasSubstr("\"reduce_bucket_size\": 500000000"));
  EXPECT_THAT(text, HasSubstr("fwd"));
  const size_t first = text.find("memory (MiB) after step 1");
  ASSERT_NE(first, std::string::npos) << text;
  EXPECT_EQ(text.find("memory (MiB) after step 1", first + 1), std::string::npos);
}

TEST(EngineUsage, AMeshTrainsDataParallelAndMaySayTheSequenceAxis) {
  const State expected = TorchRun{.world = 4, .steps = 3}.train_adamw();
  run_ranks(4, [&](comm::Communicator& communicator) {
    const auto mesh_of = [&](const comm::MeshSizes& sizes) {
      return std::make_shared<comm::DeviceMesh>(borrowed(communicator), comm::MeshLayout(sizes));
    };
    SmallNet model;
    const auto engine =
        initialize({.model = model.ptr(), .config = small_config(2, 1), .mesh = mesh_of({.data = 2, .expert = 2})})
            .engine;
    EXPECT_EQ(engine->dp_world_size(), 4);
    EXPECT_LT(largest_difference(train(*engine, model, 3), expected), 2e-6);
    SmallNet other;
    const auto cut =
        initialize({.model = other.ptr(), .config = small_config(2, 1), .mesh = mesh_of({.data = 2, .sequence = 2})})
            .engine;
    EXPECT_EQ(cut->dp_world_size(), 2);
    EXPECT_EQ(cut->plan().topology.sequence, 2);
  });
}

TEST(EngineUsage, CallsOutOfOrderNameTheExpectedOne) {
  run_ranks(1, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), small_config(0, 1), communicator).engine;
    EXPECT_THAT([&] { engine->step(); }, ThrowsMessage<UsageError>(HasSubstr("step() was called before backward()")));
    EXPECT_THAT([&] { engine->backward(torch::ones({3})); }, ThrowsMessage<UsageError>(HasSubstr("scalar loss")));
    EXPECT_THAT([&] { engine->backward(torch::ones({})); }, ThrowsMessage<UsageError>(HasSubstr("no graph")));
    const auto guard = engine->no_sync();
    EXPECT_THAT([&] { const auto second = engine->no_sync(); }, ThrowsMessage<UsageError>(HasSubstr("no_sync")));
    engine->backward(model->loss(sample(0, 0)));
    EXPECT_THAT([&] { engine->step(); }, ThrowsMessage<UsageError>(HasSubstr("inside no_sync()")));
  });
}

TEST(EngineUsage, UnusedParametersAreNamedWhenTheConfigForbidsThem) {
  ordered_json config = small_config(2, 1);
  config["zero_optimization"]["ignore_unused_parameters"] = false;
  run_ranks(1, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), config, communicator).engine;
    engine->backward(model->first(sample(0, 0)).pow(2).mean());
    EXPECT_THAT([&] { engine->step(); },
                ThrowsMessage<UsageError>(
                    AllOf(HasSubstr("last.weight"), HasSubstr("norm.bias"), HasSubstr("ignore_unused_parameters"))));
  });
}

TEST(EngineUsage, InitializeRefusesWhatItCannotRun) {
  run_ranks(1, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto begin = [&](const ordered_json& config) { start(model.ptr(), config, communicator); };
    EXPECT_THAT([&] { initialize({.config = small_config(0, 1), .communicator = borrowed(communicator)}); },
                ThrowsMessage<UsageError>(HasSubstr("expected a model")));
    EXPECT_THAT([&] { initialize({.model = model.ptr(), .communicator = borrowed(communicator)}); },
                ThrowsMessage<ConfigError>(HasSubstr("expected a ds_config")));
    ordered_json config = small_config(3, 1);
    config["zero_optimization"]["zeropp_loco_param"] = nlohmann::json::object();
    EXPECT_THAT([&] { begin(config); }, ThrowsMessage<ConfigError>(HasSubstr("zero_optimization.zeropp_loco_param")));
    config = small_config(0, 1);
    config["gradient_clip_by_value"] = 1.0;
    config["gradient_clipping"] = 1.0;
    EXPECT_THAT([&] { begin(config); },
                ThrowsMessage<ConfigError>(AllOf(HasSubstr("gradient_clip_by_value"), HasSubstr("gradient_clipping"))));
    const auto lbfgs = std::make_shared<torch::optim::LBFGS>(model->parameters());
    EXPECT_THAT(
        [&] {
          initialize({.model = model.ptr(),
                      .config = small_config(1, 1),
                      .optimizer = lbfgs,
                      .communicator = borrowed(communicator)});
        },
        ThrowsMessage<ConfigError>(AllOf(HasSubstr("LBFGS"), HasSubstr("stage 0"))));
    EXPECT_THAT(
        [&] {
          initialize({.model = model.ptr(),
                      .config = small_config(1, 1),
                      .parameter_groups = {{.parameters = {"lastt.*"}}},
                      .communicator = borrowed(communicator)});
        },
        ThrowsMessage<UsageError>(HasSubstr("\"lastt.*\" matches no trainable parameter")));
    EXPECT_THAT(
        [&] {
          initialize({.model = model.ptr(),
                      .config = small_config(0, 1),
                      .communicator = borrowed(communicator),
                      .device = "tpu"});
        },
        ThrowsMessage<ConfigError>(HasSubstr("tpu")));
  });
}

// An order of features, say, or weights of a quantized layer.
TEST(EngineUsage, AFrozenParameterOfIntegersIsToBeABuffer) {
  run_ranks(1, [&](comm::Communicator& communicator) {
    SmallNet model;
    model->register_parameter("order", torch::arange(6), /*requires_grad=*/false);
    EXPECT_THAT([&] { start(model.ptr(), small_config(0, 1), communicator); },
                ThrowsMessage<UsageError>(AllOf(HasSubstr("parameter order: expected a dense float32"),
                                                HasSubstr("register_buffer(\"order\", values)"),
                                                Not(HasSubstr("model->to(torch::kFloat)")))));
  });
}

TEST(EngineUsage, RanksThatDifferAreNamed) {
  const auto failure_of = [](auto&& body) {
    try {
      run_ranks(2, body);
    } catch (const test::RankFailure& failure) {
      return std::string(failure.what());
    }
    return std::string("no failure");
  };
  EXPECT_THAT(failure_of([&](comm::Communicator& communicator) {
                SmallNet model;
                start(model.ptr(), small_config(communicator.rank(), 1), communicator);
              }),
              HasSubstr("the ds_config of rank 1 differs"));
  EXPECT_THAT(failure_of([&](comm::Communicator& communicator) {
                torch::nn::Linear model(3 + communicator.rank(), 2);
                start(model.ptr(), small_config(0, 1), communicator);
              }),
              HasSubstr("the parameters (names, shapes, dtypes) of rank 1 differ"));
}

TEST(EngineUsage, AGradientMadeOutsideOfTheEngineIsRefused) {
  run_ranks(1, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), small_config(1, 1), communicator).engine;
    EXPECT_THAT([&] { model->loss(sample(0, 0)).backward(); },
                ThrowsMessage<UsageError>(HasSubstr("engine->backward(loss)")));
  });
}

}  // namespace
}  // namespace ds::engine
