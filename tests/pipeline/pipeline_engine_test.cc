// Pipelines together with what else the engine does: checkpoints, evaluation, errors.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <fstream>
#include <string>
#include <vector>

#include "core/check.h"
#include "tests/pipeline/pipeline_job.h"
#include "tests/support/borrowed.h"
#include "tests/support/scratch_folder.h"

namespace ds::pipeline {
namespace {

using testing::AllOf;
using testing::AnyOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

TEST(PipelineEngine, AnOverflowOnOneStageSkipsTheStepOnAll) {
  nlohmann::json config = config_of(2, "1f1b", 1);
  config["fp16"] = {{"enabled", true}, {"initial_scale_power", 8}, {"hysteresis", 1}};
  std::vector<std::vector<double>> scales(2);
  Job job{.config = config};
  auto overflows = std::make_shared<std::atomic<bool>>(false);
  job.options.loss = [overflows](const at::Tensor& logits, const at::Tensor& labels) {
    const at::Tensor loss = cross_entropy(logits.to(at::kFloat), labels);
    return *overflows ? loss * 1e30 : loss;
  };
  run(job, [&](Rank& rank) {
    for (int step = 0; step < 4; ++step) {
      if (rank.engine.is_last_stage()) *overflows = step == 2;
      rank.train_step(step);
      EXPECT_EQ(rank.engine.was_step_applied(), step != 2) << "rank " << rank.world_rank;
      scales[static_cast<size_t>(rank.world_rank)].push_back(rank.engine.loss_scale());
    }
    EXPECT_EQ(rank.engine.skipped_steps(), 1);
  });
  EXPECT_EQ(scales[0], scales[1]);
  EXPECT_EQ(scales[0].back(), 128.0);
}

TEST(PipelineEngine, TiedWeightsStayEqualOnAllTheirRanks) {
  for (const char* schedule : {"1f1b", "interleaved"}) {
    std::vector<at::Tensor> copies(4);
    run({.ranks = 4, .config = config_of(2, schedule, 1)}, [&](Rank& rank) {
      for (int step = 0; step < kSteps; ++step) rank.train_step(step);
      for (auto& [name, value] : rank.engine.module_state_dict()) {
        if (name == "embed.weight") copies[static_cast<size_t>(rank.world_rank)] = value.clone();
      }
    });
    for (const at::Tensor& copy : copies) {
      ASSERT_TRUE(copy.defined());
      EXPECT_TRUE(torch::equal(copy, copies[0]));
    }
  }
}

TEST(PipelineEngine, OneBitAdamTrainsInTheGroupsOfAPipeline) {
  nlohmann::json config = config_of(2, "1f1b", 1);
  config["optimizer"] = {{"type", "OneBitAdam"}, {"params", {{"lr", 1e-3}, {"freeze_step", 6}}}};
  const std::vector<double> losses = losses_of({.ranks = 4, .config = config}, 20);
  EXPECT_LT(losses.back(), losses[6]);
  // Until the freeze it is what Adam is on one stage.
  nlohmann::json alone = config_of(1, "1f1b", 1);
  alone["optimizer"] = config["optimizer"];
  const std::vector<double> wanted = losses_of({.ranks = 2, .config = alone}, 20);
  for (size_t i = 0; i < 6; ++i) EXPECT_NEAR(losses[i], wanted[i], 5e-6);
  EXPECT_NEAR(losses.back(), wanted.back(), 0.05 * wanted.back());
}

TEST(PipelineEngine, EvaluatesAsPlainTorch) {
  PipelineModule plain(layers_of(4, true), {.loss = cross_entropy});
  plain.build({});
  double wanted = 0;
  for (int64_t m = 0; m < 3; ++m) {
    const MicroBatch batch = tokens_of(m, 0);
    wanted += cross_entropy(plain.forward(batch.inputs[0]), batch.labels[0]).item<double>() / 3;
  }
  for (const char* schedule : {"1f1b", "interleaved", "zbv"}) {
    run({.config = config_of(2, schedule, 3)}, [&](Rank& rank) {
      const auto next = [&] { return tokens_of(rank.next++, 0); };
      const engine::Evaluation all =
          rank.engine.eval_batch(next, {.num_micro_batches = 3, .return_logits = true, .broadcast_logits = true});
      EXPECT_NEAR(all.loss.item<double>(), wanted, 1e-6);
      ASSERT_EQ(all.logits.size(), 3U);
      EXPECT_TRUE(torch::allclose(all.logits[2].at(0), plain.forward(tokens_of(2, 0).inputs[0])));
      // Other shapes than before, and without labels.
      const auto longer = [&] { return MicroBatch{.inputs = {torch::arange(12).view({1, 12})}, .labels = {}}; };
      const engine::Evaluation one =
          rank.engine.eval_batch(longer, {.num_micro_batches = 1, .compute_loss = false, .return_logits = true});
      EXPECT_FALSE(one.loss.defined());
      EXPECT_EQ(one.logits.size(), rank.engine.is_last_stage() ? 1U : 0U);
      rank.train_step(0);  // goes on
      EXPECT_TRUE(rank.engine.module()->is_training());
    });
  }
}

TEST(PipelineEngine, MicroBatchesOfManyShapesNeedToBeAnnounced) {
  const auto varying = [](Rank& rank) {
    return rank.engine.train_batch([&rank] {
      MicroBatch batch = tokens_of(rank.next, 0);
      const int64_t length = 5 - rank.next++ % 3;
      return MicroBatch{.inputs = {batch.inputs[0].narrow(1, 0, length).contiguous()},
                        .labels = {batch.labels[0].narrow(1, 0, length).contiguous()}};
    });
  };
  Job job{.config = config_of(2, "1f1b", 1)};
  std::string message;
  const auto note = [&](Rank& rank) {
    try {
      varying(rank);
    } catch (const UsageError& error) {
      message = error.what();
      throw;
    }
  };
  EXPECT_THROW(run(job, note), test::RankFailure);
  EXPECT_THAT(message, AllOf(HasSubstr("activation of stage 0, micro-batch 1"), HasSubstr("(embed, "),
                             HasSubstr("[2, 5, 16]"), HasSubstr("[2, 4, 16]"), HasSubstr("dynamic_shape")));
  job.options.dynamic_shape = true;
  std::vector<double> losses;
  run(job, [&](Rank& rank) {
    for (int step = 0; step < kSteps; ++step) {
      rank.next = 4 * step;
      const double loss = varying(rank).item<double>();
      if (rank.world_rank == 0) losses.push_back(loss);
    }
  });
  EXPECT_LT(losses.back(), losses.front());
}

struct BrokenImpl : torch::nn::Module {
  BrokenImpl() { weight = register_parameter("weight", torch::ones({3})); }
  at::Tensor forward(const at::Tensor& x) { return x + weight; }
  at::Tensor weight;
};
TORCH_MODULE(Broken);

TEST(PipelineEngine, AnErrorOfALayerNamesStageMicroBatchAndLayer) {
  Job job{.config = config_of(2, "1f1b", 0)};
  job.layers = [] {
    std::vector<LayerSpec> layers = layers_of(4, false);
    layers.insert(layers.end() - 1, LayerSpec::of<Broken>().named("broken"));
    return layers;
  };
  std::string message;
  const auto note = [&message](Rank& rank) {
    try {
      rank.train();
    } catch (const UsageError& error) {
      message = error.what();  // here: when it has left, the other rank may be the first to be heard
      throw;
    }
  };
  EXPECT_THROW(run(job, note), test::RankFailure);
  EXPECT_THAT(message, AllOf(HasSubstr("micro-batch 0, stage 1, layer 5 "), HasSubstr("(broken, "),
                             HasSubstr("size of tensor"), HasSubstr("it was given")));
}

TEST(PipelineEngine, RanksEndWhenAStageIsGone) {
  const auto leave = [](Rank& rank) {
    for (int step = 0; step < 3; ++step) {
      if (rank.world_rank == 2 && step == 2) throw std::runtime_error("gone");
      rank.train_step(step);
    }
  };
  // Whoever is the first to fail: the one that leaves, or one that waits for it.
  EXPECT_THAT([&] { run({.ranks = 4, .config = config_of(4, "1f1b", 0)}, leave); },
              ThrowsMessage<test::RankFailure>(AnyOf(HasSubstr("rank 2: gone"), HasSubstr("micro-batch"))));
}

TEST(PipelineEngine, OtherCallsSayWhatIsExpected) {
  run({.config = config_of(2, "1f1b", 1)}, [](Rank& rank) {
    engine::Engine& engine = rank.engine;
    EXPECT_THAT([&] { engine.backward(torch::ones({}, torch::requires_grad())); },
                ThrowsMessage<UsageError>(HasSubstr("train_batch()")));
    EXPECT_THAT([&] { engine.step(); }, ThrowsMessage<UsageError>(HasSubstr("train_batch()")));
    EXPECT_THAT([&] { engine.train_batch(); }, ThrowsMessage<UsageError>(HasSubstr("set_dataloader()")));
    EXPECT_EQ(engine.is_first_stage(), rank.world_rank == 0);
    EXPECT_EQ(engine.is_last_stage(), rank.world_rank == 1);
    EXPECT_EQ(engine.pipe_parallel_size(), 2);
    EXPECT_EQ(engine.world_size(), 2);
    EXPECT_EQ(engine.dp_world_size(), 1);
    EXPECT_EQ(engine.train_batch_size(), 8);
  });
}

TEST(PipelineEngine, ConfigsThatCannotRunAreRefused) {
  const auto refusal = [](const nlohmann::json& config, int ranks, std::optional<int> stages = {}) {
    std::string message;
    try {
      Job job{.ranks = ranks, .config = config};
      job.options.stages = stages;
      run(job, [](Rank&) {});
    } catch (const test::RankFailure& failure) {
      message = failure.what();
    }
    return message;
  };
  EXPECT_THAT(refusal(config_of(2, "1f1b", 1), 3), AllOf(HasSubstr("pipeline.stages"), HasSubstr("divisor of the 3")));
  EXPECT_THAT(refusal(config_of(2, "2f2b", 1), 2), AllOf(HasSubstr("2f2b"), HasSubstr("zb_h1")));
  EXPECT_THAT(refusal(config_of(2, "inference", 1), 2), HasSubstr("one that trains"));
  EXPECT_THAT(refusal(config_of(2, "1f1b", 1), 2, 1),
              AllOf(HasSubstr("pipeline.stages"), HasSubstr("PipelineOptions")));
  EXPECT_THAT(refusal(config_of(8, "1f1b", 1), 8), AllOf(HasSubstr("6 layers for 8 stages")));
  nlohmann::json speculative = config_of(2, "1f1b", 1);
  speculative["zero_optimization"]["offload_optimizer"] = {{"device", "cpu"}, {"super_offload", true}};
  EXPECT_THAT(refusal(speculative, 2), HasSubstr("super_offload"));
  test::run_ranks(2, [](comm::Communicator& world) {
    const auto ranks = test::borrowed(world);
    EXPECT_THAT(
        [&] {
          engine::initialize({.model = Mixer("m").ptr(), .config = config_of(2, "1f1b", 1), .communicator = ranks});
        },
        ThrowsMessage<ConfigError>(AllOf(HasSubstr("pipeline.stages"), HasSubstr("PipelineModule"))));
  });
}

// A layer of two tensors, and one that changes how many there are.
struct GatedImpl : torch::nn::Module {
  GatedImpl() { inner = register_module("inner", Mixer("gated")); }
  std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& x, const at::Tensor& keep) {
    return {inner(x) * keep, keep};
  }
  Mixer inner{nullptr};
};
TORCH_MODULE(Gated);

TEST(PipelineEngine, StagesSendTuplesAndTensorsWithoutGradient) {
  Job job;
  job.layers = [] {
    std::vector<LayerSpec> layers;
    layers.push_back(LayerSpec::of<TokenEmbedding>("embed").named("embed"));
    layers.push_back(LayerSpec::function([](const at::Tensor& x) {
      return std::make_tuple(x, (torch::arange(kWidth) % 3 != 0).to(torch::kFloat), torch::arange(4));
    }));
    // The whole numbers travel over a stage and are dropped.
    layers.push_back(LayerSpec::function([](const Tensors& all) { return all; }));
    layers.push_back(LayerSpec::function([](const at::Tensor& x, const at::Tensor& keep, const at::Tensor& numbers) {
      return Tensors{x + static_cast<double>(numbers.size(0)) * 0.01, keep};
    }));
    for (const char* name : {"a", "b", "c"}) layers.push_back(LayerSpec::of<Gated>().named(name));
    layers.push_back(LayerSpec::function([](const at::Tensor& x, const at::Tensor&) { return x; }));
    layers.push_back(LayerSpec::of<Head>("head").named("head"));
    return layers;
  };
  job.options.partition = "uniform";
  job.config = config_of(1, "1f1b", 1);
  job.ranks = 1;
  const std::vector<double> wanted = losses_of(job);
  EXPECT_LT(wanted.back(), wanted.front());
  job.ranks = 3;
  for (const char* schedule : {"1f1b", "zb_h2", "gpipe"}) {
    job.config = config_of(3, schedule, 1);
    expect_near(losses_of(job), wanted, 5e-6);
  }
}

TEST(PipelineEngine, AScheduleOfOnesOwn) {
  test::ScratchFolder folder;
  const std::string path = folder / "mine.csv";
  std::ofstream(path) << "0F0,0F1,0F2,0B0,0F3,0B1,0B2,0B3\n,1F0,1F1,1B0,1F2,1B1,1F3,1B2,1B3\n";
  const std::vector<double> wanted = losses_of({.ranks = 1, .config = config_of(1, "1f1b", 1)});
  expect_near(losses_of({.config = config_of(2, path, 1)}), wanted, 5e-6);
  // The program's word counts, in either direction: a file, or a kind in place of the file.
  const PipelineOptions from_file{.loss = cross_entropy, .schedule = path};
  expect_near(losses_of({.config = config_of(2, "1f1b", 1), .options = from_file}), wanted, 5e-6);
  const PipelineOptions by_kind{.loss = cross_entropy, .schedule = "1f1b"};
  run({.config = config_of(2, path, 1), .options = by_kind}, [&](Rank& rank) {
    rank.engine.set_train_batch_size(12);  // the file has four micro-batches, and would be refused for six
    EXPECT_TRUE(std::isfinite(rank.train_step(0)));
  });
}

TEST(PipelineEngine, TheBatchSizeMayChange) {
  const auto losses = [](int stages) {
    std::vector<double> found;
    run({.ranks = stages, .config = config_of(stages, "zb_h1", 1)}, [&](Rank& rank) {
      for (int step = 0; step < 4; ++step) {
        if (step == 2) rank.engine.set_train_batch_size(12);
        rank.next = step < 2 ? 4 * step : 8 + 6 * (step - 2);
        const double loss = rank.train().item<double>();
        if (rank.world_rank == 0) found.push_back(loss);
      }
    });
    return found;
  };
  expect_near(losses(2), losses(1), 5e-6);
}

TEST(PipelineEngine, ReadsTheTrainingDataOfTheEngine) {
  struct Data {
    torch::data::Example<> get(size_t index) {
      const MicroBatch batch = tokens_of(static_cast<int64_t>(index), 0);
      return {batch.inputs[0][0], batch.labels[0][0]};
    }
    std::optional<size_t> size() const { return 20; }
  };
  const auto losses = [](int stages) {
    std::vector<double> found;
    test::run_ranks(stages, [&](comm::Communicator& world) {
      const auto model = std::make_shared<PipelineModule>(layers_of(4, true), PipelineOptions{.loss = cross_entropy});
      const auto ranks = test::borrowed(world);
      auto parts = engine::initialize(
          {.model = model, .config = config_of(stages, "1f1b", 1), .training_data = Data(), .communicator = ranks});
      for (int step = 0; step < 4; ++step) {  // one and a half epochs
        const double loss = parts.engine->train_batch().item<double>();
        if (world.rank() == 0) found.push_back(loss);
      }
    });
    return found;
  };
  expect_near(losses(2), losses(1), 5e-6);
}

// What a run of 4 + 4 steps gives when it goes on, after 4, from a checkpoint on other ranks.
TEST(PipelineEngine, CheckpointsGoOnWithAnyNumberOfStages) {
  struct Layout {
    int stages, ranks, zero_stage;
    const char* schedule;
  };
  const std::vector<Layout> layouts = {
      {1, 2, 1, "1f1b"}, {2, 2, 0, "1f1b"}, {2, 4, 3, "zb_h1"}, {2, 4, 2, "zbv"}, {3, 3, 1, "gpipe"}};
  const auto config = [](const Layout& layout) { return config_of(layout.stages, layout.schedule, layout.zero_stage); };
  // The batch is that of two data-parallel ranks; one rank reads both shares.
  const auto train = [](Rank& rank, int first, int steps, std::vector<double>& losses) {
    const int shares = 2 / rank.engine.dp_world_size();
    rank.engine.set_train_batch_size(16);
    for (int step = first; step < first + steps; ++step) {
      int64_t asked = 0;
      const at::Tensor loss = rank.engine.train_batch([&] {
        const int64_t micro_batch = 4 * step + asked / shares;
        const int share = shares == 1 ? rank.engine.communicator().rank() : static_cast<int>(asked % 2);
        ++asked;
        return tokens_of(micro_batch, share);
      });
      if (rank.world_rank == 0) losses.push_back(loss.item<double>());
    }
  };
  for (const Layout& writer : layouts) {
    test::ScratchFolder folder;
    std::vector<double> wanted;
    run({.ranks = writer.ranks, .config = config(writer)}, [&](Rank& rank) {
      std::vector<double> before;
      train(rank, 0, 4, before);
      rank.engine.save_checkpoint(folder.path().string());
      train(rank, 4, 4, wanted);
    });
    for (const Layout& reader : layouts) {
      SCOPED_TRACE(cat("stages ", writer.stages, " zero ", writer.zero_stage, " -> stages ", reader.stages, " zero ",
                       reader.zero_stage));
      std::vector<double> found;
      run({.ranks = reader.ranks, .config = config(reader)}, [&](Rank& rank) {
        const engine::LoadedCheckpoint loaded = rank.engine.load_checkpoint(folder.path().string());
        EXPECT_FALSE(loaded.path.empty());
        EXPECT_EQ(rank.engine.global_steps(), 4);
        train(rank, 4, 4, found);
      });
      const bool same = &writer == &reader;
      expect_near(found, wanted, same ? 0.0 : 5e-6);
    }
  }
}

}  // namespace
}  // namespace ds::pipeline
