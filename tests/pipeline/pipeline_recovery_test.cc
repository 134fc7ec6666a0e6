// Batches that end in an exception, and the modes and shapes that calls leave behind.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ATen/autocast_mode.h>

#include <chrono>
#include <cmath>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/check.h"
#include "dsengine/optimizer.h"
#include "tests/pipeline/pipeline_job.h"
#include "tests/support/borrowed.h"

namespace ds::pipeline {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

// What fails when a step is tried first.
enum class Fault { kNone, kSource, kLoss };

at::Tensor picky_cross_entropy(const at::Tensor& logits, const at::Tensor& labels) {
  require(labels.max().item<int64_t>() < kVocabulary, "a label beyond the vocabulary");
  return cross_entropy(logits, labels);
}

// Steps of one stage, the third of which is tried with a bad micro-batch `at` on all ranks before.
std::vector<double> losses_after(Fault fault, int zero_stage, int64_t at) {
  Job job{.config = config_of(1, "1f1b", zero_stage)};
  job.options.loss = picky_cross_entropy;
  std::vector<double> losses;
  run(job, [&](Rank& rank) {
    for (int step = 0; step < kSteps; ++step) {
      if (step == 2 && fault != Fault::kNone) {
        int64_t given = 0;
        const auto broken = [&] {
          MicroBatch batch = tokens_of(100 + given, rank.engine.communicator().rank());
          if (given++ != at) return batch;
          if (fault == Fault::kSource) throw std::runtime_error("the file has ended");
          batch.labels[0] = batch.labels[0] + kVocabulary;
          return batch;
        };
        EXPECT_THROW(rank.engine.train_batch(broken), std::runtime_error);
        EXPECT_EQ(rank.engine.global_steps(), 2);
        EXPECT_EQ(rank.engine.micro_steps(), 8);
        EXPECT_FALSE(rank.engine.was_step_applied());
      }
      const double loss = rank.train_step(step);
      if (rank.world_rank == 0) losses.push_back(loss);
    }
    EXPECT_EQ(rank.engine.global_steps(), kSteps);
    EXPECT_EQ(rank.engine.micro_steps(), 4 * kSteps);
  });
  return losses;
}

TEST(PipelineRecovery, AFailedBatchOfOneStageLeavesNothingBehind) {
  for (const int zero_stage : {0, 1, 2, 3}) {
    const std::vector<double> wanted = losses_after(Fault::kNone, zero_stage, 0);
    for (const Fault fault : {Fault::kSource, Fault::kLoss}) {
      for (const int64_t at : {0, 2, 3}) {
        SCOPED_TRACE(cat("zero ", zero_stage, fault == Fault::kLoss ? " loss" : " source", ", micro-batch ", at));
        EXPECT_EQ(losses_after(fault, zero_stage, at), wanted);
      }
    }
  }
}

TEST(PipelineRecovery, AFailedBatchOfSeveralStagesIsTheLast) {
  Job job{.config = config_of(2, "1f1b", 1)};
  job.options.loss = picky_cross_entropy;
  run(job, [](Rank& rank) {
    rank.train_step(0);
    const auto step = [&] {
      rank.engine.train_batch([&] {
        MicroBatch batch = tokens_of(rank.next, 0);
        if (rank.next++ == 6) batch.labels[0] = batch.labels[0] + kVocabulary;
        return batch;
      });
    };
    rank.next = 4;
    if (rank.engine.is_last_stage()) {
      EXPECT_THAT(step, ThrowsMessage<UsageError>(AllOf(HasSubstr("micro-batch 2"), HasSubstr("beyond the vocab"))));
      EXPECT_THAT([&] { rank.train_step(1); },
                  ThrowsMessage<UsageError>(AllOf(HasSubstr("cannot go on"), HasSubstr("beyond the vocabulary"),
                                                  HasSubstr("last checkpoint"))));
    } else {
      EXPECT_THROW(step(), CommError);  // the other rank has left
      EXPECT_THAT([&] { rank.train_step(1); }, ThrowsMessage<UsageError>(HasSubstr("cannot go on")));
    }
  });
}

TEST(PipelineRecovery, EvaluationLeavesTheModesOfModules) {
  run({.ranks = 1, .config = config_of(1, "1f1b", 3)}, [](Rank& rank) {
    engine::Engine& engine = rank.engine;
    const auto norm_of = [&](const char* layer) { return engine.module()->named_modules()[cat("h.", layer, ".norm")]; };
    const auto expect_modes = [&] {
      EXPECT_TRUE(engine.module()->is_training());
      EXPECT_FALSE(norm_of("1")->is_training()) << "the program's own choice";
      EXPECT_TRUE(norm_of("2")->is_training());
    };
    norm_of("1")->eval();
    const auto good = [&] {
      EXPECT_FALSE(norm_of("2")->is_training());
      return tokens_of(rank.next++, 0);
    };
    engine.eval_batch(good);
    expect_modes();
    EXPECT_THROW(engine.eval_batch([]() -> MicroBatch { throw std::runtime_error("the file has ended"); }),
                 std::runtime_error);
    expect_modes();
    rank.train_step(0);
    expect_modes();
    // After eval() of the whole, training is training.
    engine.eval();
    engine.eval_batch(good);
    EXPECT_FALSE(engine.module()->is_training());
    rank.train_step(1);
    EXPECT_TRUE(engine.module()->is_training());
    EXPECT_TRUE(norm_of("1")->is_training());
  });
}

TEST(PipelineRecovery, ShapesMayChangeWhenAllAreTold) {
  const auto steps = [](Rank& rank, int64_t length, int first) {
    std::vector<double> losses;
    for (int step = first; step < first + 3; ++step) {
      rank.next = 4 * step;
      const at::Tensor loss = rank.engine.train_batch([&] {
        MicroBatch batch = tokens_of(rank.next++, 0);
        for (at::Tensor* tensor : {&batch.inputs[0], &batch.labels[0]}) {
          *tensor = tensor->narrow(1, 0, length).contiguous();
        }
        return batch;
      });
      losses.push_back(loss.item<double>());
    }
    return losses;
  };
  const auto both = [&](int stages) {
    std::vector<double> losses;
    run({.ranks = stages, .config = config_of(stages, "zb_h1", 1)}, [&](Rank& rank) {
      std::vector<double> own = steps(rank, 5, 0);
      rank.engine.reset_activation_shape();
      for (const double loss : steps(rank, 3, 3)) own.push_back(loss);
      if (rank.world_rank == 0) losses = own;
    });
    return losses;
  };
  expect_near(both(2), both(1), 5e-6);
  std::string message;
  const auto untold = [&](Rank& rank) {
    steps(rank, 5, 0);
    try {
      steps(rank, 3, 3);
    } catch (const UsageError& error) {
      message = error.what();
      throw;
    }
  };
  EXPECT_THROW(run({.config = config_of(2, "1f1b", 1)}, untold), test::RankFailure);
  EXPECT_THAT(message, HasSubstr("reset_activation_shape() on all ranks"));
}

TEST(PipelineRecovery, ANewMicroBatchSizeIsAgreedAnew) {
  const auto losses = [](int stages) {
    std::vector<double> found;
    run({.ranks = stages, .config = config_of(stages, "1f1b", 1)}, [&](Rank& rank) {
      for (int step = 0; step < 4; ++step) {
        if (step == 2) rank.engine.set_train_micro_batch_size(1);
        rank.next = 4 * step;
        const at::Tensor loss = rank.engine.train_batch([&] {
          MicroBatch batch = tokens_of(rank.next++, 0);
          const int64_t size = rank.engine.train_micro_batch_size_per_gpu();
          for (at::Tensor* tensor : {&batch.inputs[0], &batch.labels[0]}) *tensor = tensor->narrow(0, 0, size);
          return batch;
        });
        if (rank.world_rank == 0) found.push_back(loss.item<double>());
      }
    });
    return found;
  };
  expect_near(losses(2), losses(1), 5e-6);
}

// Of the layered model: token sequences and what is to follow.
struct SizedTokens {
  size_t samples;
  torch::data::Example<> get(size_t index) {
    const MicroBatch batch = tokens_of(static_cast<int64_t>(index), 0);
    return {batch.inputs[0][0], batch.labels[0][0]};
  }
  std::optional<size_t> size() const { return samples; }
};

TEST(PipelineRecovery, TrainingDataWithAShorterLastBatchIsRefused) {
  struct Case {
    int stages;
    size_t samples;
    bool drop_last, dynamic, refused;
  };
  // Micro-batches of 2; of 2 x 2 data-parallel ranks with one stage.
  const std::vector<Case> cases = {{2, 21, false, false, true},  {2, 20, false, false, false},
                                   {2, 21, true, false, false},  {2, 21, false, true, false},
                                   {1, 21, false, false, false}, {2, 1, false, false, false}};
  for (const Case& tried : cases) {
    SCOPED_TRACE(cat(tried.stages, " stages, ", tried.samples, " samples"));
    nlohmann::json config = config_of(tried.stages, "1f1b", 1);
    config["dataloader_drop_last"] = tried.drop_last;
    test::run_ranks(2, [&](comm::Communicator& world) {
      const auto ranks = test::borrowed(world);
      const auto start = [&](engine::TrainingData data) {
        const auto model = std::make_shared<PipelineModule>(
            layers_of(4, true), PipelineOptions{.loss = cross_entropy, .dynamic_shape = tried.dynamic});
        return engine::initialize(
            {.model = model, .config = config, .training_data = std::move(data), .communicator = ranks});
      };
      const auto own_loader = std::make_shared<engine::DataLoader>(
          SizedTokens{tried.samples}, engine::DataLoaderOptions{.micro_batch_size = 2, .drop_last = tried.drop_last});
      const auto engine = start({}).engine;
      if (!tried.refused) {
        start(SizedTokens{tried.samples});
        engine->set_dataloader(own_loader);
        return;
      }
      EXPECT_THAT([&] { start(SizedTokens{tried.samples}); },
                  ThrowsMessage<ConfigError>(AllOf(HasSubstr(".training_data"), HasSubstr("dataloader_drop_last"))));
      EXPECT_THAT([&] { engine->set_dataloader(own_loader); },
                  ThrowsMessage<ConfigError>(AllOf(HasSubstr("set_dataloader()"), HasSubstr("dynamic_shape"))));
    });
  }
}

// Two pipelines of two ranks, where each would find another layer slow.
TEST(PipelineRecovery, PipelinesThatMeasureLayersAreCutAlike) {
  test::run_ranks(4, [](comm::Communicator& world) {
    torch::set_num_threads(1);
    std::vector<LayerSpec> layers = layers_of(6, false);
    for (const int place : {1, 7}) {
      const bool slow = world.rank() % 2 == (place == 1 ? 0 : 1);
      layers.insert(layers.begin() + place, LayerSpec::function([slow](const at::Tensor& x) {
                      if (slow) std::this_thread::sleep_for(std::chrono::milliseconds(30));
                      return x;
                    }));
    }
    const auto model = std::make_shared<PipelineModule>(
        layers,
        PipelineOptions{.loss = cross_entropy, .partition = "profile", .profile_inputs = tokens_of(0, 0).inputs});
    const auto ranks = test::borrowed(world);
    const auto engine =
        engine::initialize({.model = model, .config = config_of(2, "1f1b", 1), .communicator = ranks}).engine;
    Rank rank{*engine, world.rank()};
    EXPECT_TRUE(std::isfinite(rank.train_step(0)));
  });
}

// Stages are compared in what they have in common.
TEST(PipelineRecovery, AnotherRateOnOneStageIsNamedBeforeTheStepIsApplied) {
  const auto train = [](bool is_wrong) {
    std::vector<double> losses;
    run({.config = config_of(2, "1f1b", 1)}, [&](Rank& rank) {
      const auto set_rate = [&](double rate) { rank.engine.optimizer()->groups()[0].lr = rate; };
      for (int step = 0; step < 3; ++step) {
        if (step == 1 && is_wrong) {
          if (rank.world_rank == 1) set_rate(0.5);
          EXPECT_THAT(
              [&] { rank.train_step(step); },
              ThrowsMessage<UsageError>(AllOf(HasSubstr("lr of parameter group 0: 0.001 on rank 0, 0.5 on rank 1"),
                                              HasSubstr("Nothing was applied"))));
          if (rank.world_rank == 1) set_rate(1e-3);
        }
        const double loss = rank.train_step(step);
        if (rank.world_rank == 0) losses.push_back(loss);
      }
    });
    return losses;
  };
  EXPECT_EQ(train(true), train(false));
}

// A layer that computes in float32 whatever autocast says of the rest.
struct ExactMixerImpl : torch::nn::Module {
  explicit ExactMixerImpl(const std::string& name) { inner = register_module("inner", Mixer(name)); }
  at::Tensor forward(const at::Tensor& x) {
    const bool before = at::autocast::is_autocast_enabled(at::kCPU);
    at::autocast::set_autocast_enabled(at::kCPU, false);
    const at::Tensor result = inner(x.to(at::kFloat));
    at::autocast::set_autocast_enabled(at::kCPU, before);
    return result;
  }
  Mixer inner{nullptr};
};
TORCH_MODULE(ExactMixer);

TEST(PipelineRecovery, BackwardInTwoPassesIsNotUnderAutocast) {
  const auto train = [](const std::string& schedule) {
    Job job{.config = config_of(2, schedule, 1)};
    job.config["torch_autocast"] = {{"enabled", true}, {"dtype", "bfloat16"}};
    job.options.loss = [](const at::Tensor& logits, const at::Tensor& labels) {
      return cross_entropy(logits.to(at::kFloat), labels);
    };
    job.layers = [] {
      std::vector<LayerSpec> layers;
      layers.push_back(LayerSpec::of<TokenEmbedding>("embed").named("embed"));
      for (const char* name : {"a", "b", "c", "d"}) {
        layers.push_back(LayerSpec::of<ExactMixer>(name).named(name));
        layers.push_back(LayerSpec::of<Mixer>(name).named(cat("low_", name)));
      }
      layers.push_back(LayerSpec::of<Head>("head").named("head"));
      return layers;
    };
    return losses_of(job);
  };
  const std::vector<double> wanted = train("1f1b");
  EXPECT_LT(wanted.back(), wanted.front());
  EXPECT_EQ(train("zb_h1"), wanted);
}

}  // namespace
}  // namespace ds::pipeline
