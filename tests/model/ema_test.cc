// The moving average of the weights that an engine keeps: torch's formula at every stage, in checkpoints and in scopes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "checkpoint/export.h"
#include "core/check.h"
#include "core/files/safetensors.h"
#include "core/text.h"
#include "tests/model/checkpoint/checkpoint_run.h"
#include "tests/model/offloaded/offload_run.h"
#include "tests/pipeline/pipeline_job.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr EmaOptions kOptions = {.decay = 0.9};

std::shared_ptr<Engine> start_ema(const std::shared_ptr<torch::nn::Module>& model, const ordered_json& config,
                                  comm::Communicator& ranks, const EmaOptions& options = kOptions) {
  return initialize({.model = model, .config = config, .ema = options, .communicator = borrowed(ranks)}).engine;
}

ordered_json of_precision(ordered_json config, const std::string& precision) {
  config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = true;
  if (precision != "fp32") config[precision]["enabled"] = true;
  if (precision == "fp16") config["fp16"]["initial_scale_power"] = 4;
  return config;
}

State averages(const std::shared_ptr<Engine>& engine) { return copy_of(ema_state_dict(engine)); }
State masters(Engine& engine) { return copy_of(engine.fp32_state_dict()); }

// torch's formula by hand, in float64.
class Expected {
 public:
  Expected(const State& first, const EmaOptions& options) : options_(options) {
    for (const auto& [name, value] : first) values_[name] = value.to(torch::kDouble).clone();
  }
  void add(const State& weights) {
    const auto n = static_cast<double>(++updates_ - options_.update_after_step);
    double decay = options_.warmup ? std::min(options_.decay, (1 + n) / (10 + n)) : options_.decay;
    if (n <= 0) decay = 0;
    for (auto& [name, value] : values_) value = decay * value + (1 - decay) * weights.at(name).to(torch::kDouble);
  }
  const State& values() const { return values_; }
  int64_t updates() const { return updates_; }

 private:
  EmaOptions options_;
  State values_;
  int64_t updates_ = 0;
};

// One step of SmallNet; `factor` multiplies the loss of the last rank.
void small_step(Engine& engine, SmallNet& model, int64_t step, double factor = 1.0) {
  const bool last = engine.global_rank() == engine.world_size() - 1;
  const at::Tensor loss = model->loss(sample(step, engine.communicator().rank()));
  engine.backward(last && factor != 1.0 ? loss * factor : loss);
  engine.step();
}

// Trains SmallNet and compares the average with the formula after each step.
void expect_formula(const std::shared_ptr<Engine>& engine, SmallNet& model, const EmaOptions& options, int steps) {
  Expected expected(masters(*engine), options);
  EXPECT_EQ(largest_difference(averages(engine), expected.values()), 0.0) << "begins with the weights";
  for (int64_t step = 0; step < steps; ++step) {
    small_step(*engine, model, step);
    expected.add(masters(*engine));
    ASSERT_LT(largest_difference(averages(engine), expected.values()), 1e-6) << "step " << step;
    EXPECT_EQ(ema_updates(engine), expected.updates());
  }
  EXPECT_GT(largest_difference(averages(engine), masters(*engine)), 1e-3) << "the weights have moved on";
}

// Stage, ranks.
class EmaTest : public ::testing::TestWithParam<std::tuple<int, int>> {};
INSTANTIATE_TEST_SUITE_P(StagesAndRanks, EmaTest,
                         ::testing::Combine(::testing::Values(0, 1, 2, 3), ::testing::Values(1, 2, 4)));

TEST_P(EmaTest, IsTorchsFormula) {
  const auto [stage, world] = GetParam();
  for (const EmaOptions& options : {kOptions, EmaOptions{.decay = 0.5, .warmup = true, .update_after_step = 2}}) {
    test::run_ranks(world, [&, stage = stage](comm::Communicator& ranks) {
      SmallNet model;
      const auto engine = start_ema(model.ptr(), small_config(stage, 1), ranks, options);
      expect_formula(engine, model, options, 6);
      int64_t elements = 0;
      for (const auto& [name, value] : masters(*engine)) elements += value.numel();
      const int64_t bytes = engine->model_state_bytes().average;  // and buckets have whole cache lines
      const int64_t sharers = stage == 0 ? 1 : ranks.size();
      EXPECT_GE(bytes, elements * 4 / sharers);
      EXPECT_LE(bytes, elements * 4 / sharers + 6 * 256);
      EXPECT_EQ(bytes, engine->plan().ema_bytes);
      EXPECT_THAT(to_table(engine->plan()), AllOf(HasSubstr("weight average"), HasSubstr(".ema.decay: ")));
    });
  }
}

class EmaStages : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Stages, EmaStages, ::testing::Range(0, 4));

TEST_P(EmaStages, IsFloat32In16BitsAndASkippedStepChangesNothing) {
  for (const std::string precision : {"bf16", "fp16"}) {
    test::run_ranks(2, [&](comm::Communicator& ranks) {
      SmallNet model;
      const auto engine = start_ema(model.ptr(), of_precision(small_config(GetParam(), 1), precision), ranks);
      expect_formula(engine, model, kOptions, 3);
      if (precision == "bf16") return;
      const State before = averages(engine);
      small_step(*engine, model, 3, std::numeric_limits<double>::infinity());
      EXPECT_FALSE(engine->was_step_applied());
      EXPECT_EQ(largest_difference(averages(engine), before), 0.0);
      EXPECT_EQ(ema_updates(engine), 3);
    });
  }
}

ordered_json narrow_masters_config(int stage) {
  ordered_json config = small_config(stage, 1);
  config["bf16"] = {{"enabled", true}, {"bf16_master_weights_and_grads", true}, {"bf16_optimizer_states", true}};
  return config;
}

TEST(Ema, IsFloat32BesideMastersOf16Bits) {
  test::run_ranks(2, [](comm::Communicator& ranks) {
    SmallNet model;
    const auto engine = start_ema(model.ptr(), narrow_masters_config(2), ranks);
    expect_formula(engine, model, kOptions, 3);
  });
}

TEST(Ema, LiesBesideOffloadedMasters) {
  const std::vector<ordered_json> sections = {on_host(), on_host({{"ratio", 0.5}}),
                                              on_host({{"delayed_update", true}, {"delayed_update_start", 1}}),
                                              on_host({{"super_offload", true}})};
  for (const int stage : {1, 3}) {
    for (const ordered_json& section : sections) {
      SCOPED_TRACE(cat("stage ", stage, " ", section.dump()));
      if (stage == 1 && section.contains("ratio")) continue;
      test::run_ranks(2, [&](comm::Communicator& ranks) {
        SmallNet model;
        const ordered_json config = with_offload(of_precision(small_config(stage, 1), "bf16"), section);
        const auto engine = start_ema(model.ptr(), config, ranks);
        EXPECT_EQ(engine->model_state_bytes().average > 0, section.contains("ratio"));
        EXPECT_THAT(to_table(engine->plan()), HasSubstr("in host memory beside the masters"));
        expect_formula(engine, model, kOptions, 4);
        const State before = masters(*engine);
        { const EmaScope averaged(engine); }
        EXPECT_EQ(largest_difference(masters(*engine), before), 0.0);
      });
    }
  }
}

TEST(Ema, OfAnOptimizerOfTheProgram) {
  test::run_ranks(2, [](comm::Communicator& ranks) {
    for (const int stage : {0, 2}) {
      SmallNet model;
      const auto adam = std::make_shared<torch::optim::Adam>(model->parameters(), torch::optim::AdamOptions(0.02));
      ordered_json config = small_config(stage, 1);
      config.erase("optimizer");
      const auto engine = initialize({.model = model.ptr(),
                                      .config = config,
                                      .optimizer = adam,
                                      .ema = kOptions,
                                      .communicator = borrowed(ranks)})
                              .engine;
      expect_formula(engine, model, kOptions, 3);
    }
  });
}

TEST(Ema, OfSplitParameters) {
  for (const int stage : {0, 3}) {
    test::run_ranks(4, [&](comm::Communicator& ranks) {
      SmallNet model;
      ordered_json config = small_config(stage, 1);
      config["tensor_parallel"] = {{"autotp_size", 2}};
      const auto engine = initialize({.model = model.ptr(),
                                      .config = config,
                                      .split = {{.pattern = "last"}},
                                      .ema = kOptions,
                                      .communicator = borrowed(ranks)})
                              .engine;
      expect_formula(engine, model, kOptions, 3);
      const State before = masters(*engine);
      const at::Tensor loss = model->loss(sample(9, 0)).detach();
      {
        const EmaScope averaged(engine);
        EXPECT_EQ(largest_difference(copy_of(engine->module_state_dict()), averages(engine)), 0.0);
      }
      EXPECT_TRUE(model->loss(sample(9, 0)).equal(loss));
      EXPECT_EQ(largest_difference(masters(*engine), before), 0.0);
    });
  }
}

TEST(Ema, OfTheStagesOfAPipeline) {
  using pipeline::PipelineModule;
  test::run_ranks(2, [](comm::Communicator& ranks) {
    torch::set_num_threads(1);
    const auto model = std::make_shared<PipelineModule>(pipeline::layers_of(4, /*tied=*/true),
                                                        pipeline::PipelineOptions{.loss = pipeline::cross_entropy});
    ordered_json config = pipeline::config_of(2, "1f1b", 1);
    config["log_level"] = "info";  // of the process, in which other tests read what is logged
    const auto engine = start_ema(model, config, ranks);
    Expected expected(masters(*engine), kOptions);
    int64_t micro = 0;
    const auto batches = [&] { return pipeline::tokens_of(micro++, 0); };
    for (int step = 0; step < 3; ++step) {
      engine->train_batch(batches);
      expected.add(masters(*engine));
    }
    EXPECT_LT(largest_difference(averages(engine), expected.values()), 1e-6);
    const State before = masters(*engine);
    {
      const EmaScope averaged(engine);
      EXPECT_THAT([&] { engine->train_batch(batches); }, ThrowsMessage<UsageError>(HasSubstr("EmaScope")));
      EXPECT_EQ(largest_difference(copy_of(engine->module_state_dict()), averages(engine)), 0.0);
    }
    EXPECT_EQ(largest_difference(masters(*engine), before), 0.0);
  });
}

// The model's parameters are the averages while the scope lasts; what training goes on from has lost no bit.
TEST_P(EmaStages, ScopeShowsTheAverageAndGivesTheWeightsBack) {
  for (const std::string precision : {"fp32", "bf16", "fp16"}) {
    test::run_ranks(2, [&](comm::Communicator& ranks) {
      const auto config = of_precision(small_config(GetParam(), 1), precision);
      SmallNet model, other;
      const auto engine = start_ema(model.ptr(), config, ranks);
      const auto undisturbed = start_ema(other.ptr(), config, ranks);
      for (int64_t step = 0; step < 3; ++step) small_step(*engine, model, step);
      for (int64_t step = 0; step < 3; ++step) small_step(*undisturbed, other, step);
      const State before = masters(*engine);
      const State shown = copy_of(engine->module_state_dict());
      const at::Tensor early = model->loss(sample(0, 0));
      {
        const EmaScope averaged(engine);
        const torch::NoGradGuard no_grad;
        State wanted = averages(engine);
        SmallNet plain;
        for (auto& item : plain->named_parameters()) item.value().copy_(wanted.at(item.key()));
        plain->to(shown.begin()->second.scalar_type());
        EXPECT_EQ(largest_difference(copy_of(engine->module_state_dict()), parameters_of(*plain)), 0.0);
        EXPECT_TRUE(model->loss(sample(5, 0)).equal(plain->loss(sample(5, 0))));
        EXPECT_FALSE(model->loss(sample(0, 0)).equal(early));
      }
      EXPECT_EQ(largest_difference(masters(*engine), before), 0.0) << precision;
      EXPECT_EQ(largest_difference(copy_of(engine->module_state_dict()), shown), 0.0) << precision;
      EXPECT_THROW(engine->backward(early), c10::Error) << "its graph has read weights that were away";
      engine->zero_grad();
      for (int64_t step = 3; step < 5; ++step) small_step(*engine, model, step);
      for (int64_t step = 3; step < 5; ++step) small_step(*undisturbed, other, step);
      EXPECT_EQ(largest_difference(masters(*engine), masters(*undisturbed)), 0.0) << precision;
      EXPECT_EQ(largest_difference(averages(engine), averages(undisturbed)), 0.0) << precision;
    });
  }
}

TEST_P(EmaStages, WhatWouldUseOrLoseTheWeightsIsRefusedInAScope) {
  const test::ScratchFolder folder;
  test::run_ranks(2, [&](comm::Communicator& ranks) {
    SmallNet model;
    const auto engine = start_ema(model.ptr(), of_precision(small_config(GetParam(), 1), "bf16"), ranks);
    small_step(*engine, model, 0);
    const State before = masters(*engine);
    {
      const EmaScope averaged(engine);
      const auto refused = [](const auto& call) {
        EXPECT_THAT(call, ThrowsMessage<UsageError>(HasSubstr("inside an EmaScope")));
      };
      refused([&] { engine->backward(model->loss(sample(1, ranks.rank()))); });
      refused([&] { engine->save_checkpoint(folder.path().string()); });
      refused([&] { engine->load_checkpoint(folder.path().string()); });
      refused([&] { engine->save_weights((folder.path() / "weights.safetensors").string()); });
      refused([&] { engine->fp32_state_dict(); });
      refused([&] { engine->safe_get_full_fp32_param(model->last->bias); });
      refused([&] { engine->safe_get_local_fp32_param(model->last->bias); });
      refused([&] { engine->safe_set_full_fp32_param(model->last->bias, torch::zeros({3})); });
      refused([&] { engine->offload_states(); });
      refused([&] { const EmaScope again(engine); });
      refused([&] { const auto whole = engine->gathered_parameters(model->parameters(), 0); });
      { const auto whole = engine->gathered_parameters(model->parameters()); }
      {
        const torch::NoGradGuard no_grad;
        model->last->bias.fill_(0.5);
      }
      EXPECT_THAT([&] { engine->module_state_dict(); },
                  ThrowsMessage<UsageError>(AllOf(HasSubstr("last.bias"), HasSubstr("inside an EmaScope"))));
    }
    EXPECT_EQ(largest_difference(masters(*engine), before), 0.0);
    small_step(*engine, model, 1);
    EXPECT_TRUE(engine->was_step_applied());
  });
}

TEST_P(EmaStages, IsExported) {
  const test::ScratchFolder folder;
  test::run_ranks(2, [&](comm::Communicator& ranks) {
    SmallNet model;
    const auto engine = start_ema(model.ptr(), of_precision(small_config(GetParam(), 1), "bf16"), ranks);
    for (int64_t step = 0; step < 2; ++step) small_step(*engine, model, step);
    const auto wanted = ema_state_dict(engine);
    const std::string one = engine->save_16bit_model(folder.path().string(), "one.safetensors", false, wanted);
    std::string other;
    {
      const EmaScope averaged(engine);
      other = engine->save_16bit_model(folder.path().string(), "other.safetensors");
    }
    engine->save_checkpoint(folder.path().string(), "tag");
    for (const auto& [name, value] : wanted) {
      EXPECT_EQ(value.scalar_type(), torch::kFloat);
      EXPECT_TRUE(SafetensorsFile(one).tensor(name).equal(value.to(torch::kBFloat16))) << name;
      EXPECT_TRUE(SafetensorsFile(other).tensor(name).equal(value.to(torch::kBFloat16))) << name;
    }
    if (ranks.rank() != 0) return;
    const auto source = checkpoint::open(folder / "tag");
    checkpoint::export_weights(*source, folder / "exported", {.ema = true});
    const SafetensorsFile exported(folder / "exported/model.safetensors");
    EXPECT_EQ(exported.entries().size(), wanted.size());
    for (const auto& [name, value] : wanted) EXPECT_TRUE(exported.tensor(name).equal(value)) << name;
  });
}

// What is saved on 2 ranks at stage 2 goes on, with a tied weight and a frozen one.
TEST_P(EmaTest, CheckpointsGoOnAtAnotherStageOnOtherRanks) {
  const auto [stage, world] = GetParam();
  const test::ScratchFolder folder;
  State saved, wanted;
  test::run_ranks(2, [&](comm::Communicator& ranks) {
    CarriedNet model;
    const auto engine = start_ema(model.ptr(), carried_config(2, 2), ranks);
    train_until(*engine, model, 4);
    engine->save_checkpoint(folder.path().string(), "tag");
    const State here = averages(engine);
    train_until(*engine, model, 7);
    const State later = averages(engine);
    if (ranks.rank() == 0) std::tie(saved, wanted) = std::pair(here, later);
  });
  test::run_ranks(world, [&, stage = stage](comm::Communicator& ranks) {
    CarriedNet model;
    forget(*model);
    const auto engine = start_ema(model.ptr(), carried_config(stage, ranks.size()), ranks);
    engine->load_checkpoint(folder.path().string(), "tag");
    EXPECT_EQ(largest_difference(averages(engine), saved), 0.0);
    EXPECT_EQ(ema_updates(engine), 4);
    train_until(*engine, model, 7);
    EXPECT_LT(largest_difference(averages(engine), wanted), 1e-5);
    EXPECT_EQ(ema_updates(engine), 7);
    engine->load_checkpoint(folder.path().string(), "tag", {.load_module_only = true});
    EXPECT_EQ(largest_difference(averages(engine), masters(*engine)), 0.0) << "begins with the weights";
    EXPECT_EQ(ema_updates(engine), 0);
  });
}

TEST(Ema, CheckpointsWithAndWithoutIt) {
  const test::ScratchFolder folder;
  test::run_ranks(2, [&](comm::Communicator& ranks) {
    CarriedNet model, other;
    const auto with = start_ema(model.ptr(), carried_config(1, 2), ranks);
    const auto without = start_ema(other.ptr(), carried_config(1, 2), ranks, {});
    train_until(*with, model, 2);
    train_until(*without, other, 3);
    with->save_checkpoint(folder / "with", "tag");
    without->save_checkpoint(folder / "without", "tag");
    with->load_checkpoint(folder / "without", "tag");
    EXPECT_EQ(largest_difference(averages(with), masters(*with)), 0.0);
    EXPECT_EQ(ema_updates(with), 0);
    without->load_checkpoint(folder / "with", "tag");
    EXPECT_EQ(without->global_steps(), 2);
    EXPECT_THAT([&] { ema_state_dict(without); }, ThrowsMessage<UsageError>(HasSubstr("pass .ema")));
    EXPECT_THAT([&] { const EmaScope scope(without); }, ThrowsMessage<UsageError>(HasSubstr("pass .ema")));
    if (ranks.rank() != 0) return;
    const auto source = checkpoint::open(folder / "without/tag");
    EXPECT_THAT([&] { checkpoint::export_weights(*source, folder / "out", {.ema = true}); },
                ThrowsMessage<UsageError>(AllOf(HasSubstr("ema/"), HasSubstr("found none"))));
  });
}

TEST(Ema, WhatCannotBeIsRefused) {
  test::run_ranks(1, [](comm::Communicator& ranks) {
    const auto refused = [&](const ordered_json& config, const EmaOptions& options, const std::string& text) {
      SmallNet model;
      EXPECT_THAT([&] { start_ema(model.ptr(), config, ranks, options); },
                  ThrowsMessage<ConfigError>(AllOf(HasSubstr(".ema"), HasSubstr(text))));
    };
    const ordered_json config = small_config(1, 1);
    refused(config, {.decay = 1.0}, "below 1, such as 0.999, found 1");
    refused(config, {.decay = -0.5}, "found -0.5");
    refused(config, {.warmup = true}, "found 0");
    refused(config, {.decay = 0.9, .update_after_step = -1}, "found -1");
    refused(with_offload(config, on_disk()), kOptions, "nvme");
    ordered_json evaluates = config;
    evaluates.erase("optimizer");
    refused(evaluates, kOptions, "without an optimizer");
    ordered_json steps_alone = small_config(0, 1);
    steps_alone["optimizer"] = {{"type", "ZeroOneAdam"}, {"params", {{"lr", 0.01}}}};
    refused(steps_alone, kOptions, "ZeroOneAdam");
  });
  EXPECT_THROW(test::run_ranks(2,
                               [](comm::Communicator& ranks) {
                                 SmallNet model;
                                 start_ema(model.ptr(), small_config(1, 1), ranks,
                                           {.decay = ranks.rank() == 0 ? 0.9 : 0.99});
                               }),
               test::RankFailure);
}

}  // namespace
}  // namespace ds::engine
