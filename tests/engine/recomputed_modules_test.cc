// Modules that are chosen by the config, or by a loop of the program's own: the same training in every stage.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "config/plan/plan.h"
#include "core/check.h"
#include "dsengine/distributed_data_parallel.h"
#include "dsengine/fully_shard.h"
#include "dsengine/module_checkpointing.h"
#include "tests/loops/block_net.h"
#include "tests/model/small_run.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using test::run_ranks;
using testing::HasSubstr;

struct ChosenRun {
  std::vector<double> losses;
  State weights;
  ModuleCheckpointStatistics statistics;
};

ordered_json with_modules(ordered_json config, const std::string& recompute) {
  config["activation_checkpointing"] = {{"modules", {"block\\d"}}, {"recompute", recompute}};
  return config;
}

ChosenRun train_chosen(const ordered_json& config, comm::Communicator& communicator) {
  take_module_checkpoint_statistics();
  test::BlockNet model;
  ChosenRun run;
  {
    const auto engine = start(model.ptr(), config, communicator).engine;
    for (int64_t micro = 0; micro < 4 * engine->gradient_accumulation_steps(); ++micro) {
      const at::Tensor loss = model->loss(test::batch_of(micro, communicator.rank()));
      engine->backward(loss);
      engine->step();
      run.losses.push_back(loss.item<double>());
    }
    run.weights = copy_of(engine->fp32_state_dict());
  }
  run.statistics = take_module_checkpoint_statistics();
  remove_activation_checkpointing(*model);
  return run;
}

void expect_same_chosen(const ordered_json& config) {
  run_ranks(2, [&](comm::Communicator& communicator) {
    const ChosenRun plain = train_chosen(config, communicator);
    EXPECT_EQ(plain.statistics.regions, 0);
    EXPECT_NE(plain.losses.front(), plain.losses.back());
    for (const char* recompute : {"all", "pointwise"}) {
      const ChosenRun chosen = train_chosen(with_modules(config, recompute), communicator);
      EXPECT_EQ(chosen.losses, plain.losses) << recompute;
      EXPECT_EQ(largest_difference(chosen.weights, plain.weights), 0.0) << recompute;
      EXPECT_EQ(chosen.statistics.regions, static_cast<int64_t>(3 * plain.losses.size()));
      EXPECT_GT(chosen.statistics.dropped_tensors, chosen.statistics.regions) << recompute;
    }
  });
}

TEST(RecomputedModules, EveryStageTrainsTheSame) {
  for (const int stage : {0, 1, 2, 3}) {
    for (const int accumulation : {1, 2}) {
      SCOPED_TRACE(cat("stage ", stage, ", accumulation ", accumulation));
      expect_same_chosen(small_config(stage, accumulation));
    }
  }
}

TEST(RecomputedModules, Bfloat16AndAutocastTrainTheSame) {
  for (const int stage : {0, 2, 3}) {
    SCOPED_TRACE(cat("stage ", stage));
    ordered_json half = small_config(stage, 2);
    half["bf16"] = {{"enabled", true}};
    expect_same_chosen(half);
    ordered_json autocast = small_config(stage, 1);
    autocast["torch_autocast"] = {{"enabled", true}};
    expect_same_chosen(autocast);
  }
}

// Each weight is used again after it was released and gathered again.
struct RepeatedImpl : torch::nn::Module {
  RepeatedImpl() {
    first = register_module("first", torch::nn::Linear(6, 6));
    second = register_module("second", torch::nn::Linear(6, 6));
    test::fill(*this, 0.2);
  }
  at::Tensor forward(const at::Tensor& x) { return first(second(first(second(x).exp())).exp()); }
  torch::nn::Linear first{nullptr}, second{nullptr};
};
TORCH_MODULE(Repeated);

TEST(RecomputedModules, WeightsThatAreGatheredAgainAreNoOthers) {
  run_ranks(2, [](comm::Communicator& communicator) {
    const auto train = [&](const char* recompute) {
      Repeated model;
      ordered_json config = small_config(3, 1);
      config["zero_optimization"]["stage3_max_reuse_distance"] = 0;
      config["zero_optimization"]["reduce_bucket_size"] = 1;
      config["zero_optimization"]["allgather_bucket_size"] = 1;
      if (recompute != nullptr) config["activation_checkpointing"] = {{"modules", {""}}, {"recompute", recompute}};
      const auto engine = start(model.ptr(), config, communicator).engine;
      for (int64_t step = 0; step < 3; ++step) {
        const at::Tensor x = sample(step, communicator.rank());
        engine->backward(model->forward(x).pow(2).mean());
        engine->step();
      }
      const State weights = copy_of(engine->fp32_state_dict());
      remove_activation_checkpointing(*model);
      return weights;
    };
    const State plain = train(nullptr);
    for (const char* recompute : {"all", "pointwise"}) {
      EXPECT_EQ(largest_difference(train(recompute), plain), 0.0) << recompute;
    }
  });
}

// Names of parameters and their values after some steps of a loop around `wrap`.
template <class Wrap>
State train_loop(comm::Communicator& communicator, bool chosen, Wrap&& wrap) {
  test::BlockNet model;
  const auto wrapped = wrap(model);
  if (chosen) apply_activation_checkpointing(*model, modules_named({"block\\d"}));
  take_module_checkpoint_statistics();
  auto optimizer = wrapped.optimizer();
  for (int step = 0; step < 5; ++step) {
    wrapped.loss(model, test::batch_of(step, communicator.rank())).backward();
    optimizer->step();
    optimizer->zero_grad();
  }
  EXPECT_EQ(take_module_checkpoint_statistics().regions, chosen ? 15 : 0);
  State state = wrapped.state(model);
  remove_activation_checkpointing(*model);
  return state;
}

template <class Wrap>
void expect_same_loop(Wrap&& wrap) {
  run_ranks(2, [&](comm::Communicator& communicator) {
    const auto around = [&](test::BlockNet& model) { return wrap(model, communicator); };
    const State plain = train_loop(communicator, false, around);
    EXPECT_EQ(largest_difference(train_loop(communicator, true, around), plain), 0.0);
  });
}

struct InDdp {
  std::shared_ptr<DistributedDataParallel<test::BlockNet>> ddp;
  std::vector<at::Tensor> parameters;
  std::unique_ptr<torch::optim::Optimizer> optimizer() const {
    return std::make_unique<torch::optim::AdamW>(parameters, torch::optim::AdamWOptions(2e-3));
  }
  at::Tensor loss(const test::BlockNet& /*model*/, const at::Tensor& x) const {
    return ((*ddp)(x)-x.narrow(1, 0, 2).sin()).pow(2).mean();
  }
  static State state(const test::BlockNet& model) { return parameters_of(*model); }
};

TEST(RecomputedModules, ALoopOverDistributedDataParallel) {
  expect_same_loop([](test::BlockNet& model, comm::Communicator& communicator) {
    const DistributedDataParallelOptions options{.process_group = borrowed(communicator)};
    return InDdp{std::make_shared<DistributedDataParallel<test::BlockNet>>(model, options), model->parameters()};
  });
}

struct InFullyShard {
  std::shared_ptr<FullySharded> sharded;
  std::unique_ptr<torch::optim::Optimizer> optimizer() const {
    return std::make_unique<torch::optim::AdamW>(sharded->parameters(), torch::optim::AdamWOptions(2e-3));
  }
  static at::Tensor loss(test::BlockNet& model, const at::Tensor& x) { return model->loss(x); }
  State state(const test::BlockNet& /*model*/) const {
    State result;
    int64_t index = 0;
    for (const at::Tensor& slice : sharded->parameters()) {
      if (slice.numel() > 0) result[cat(index)] = slice.detach().clone();
      ++index;
    }
    return result;
  }
};

TEST(RecomputedModules, ALoopOverFullyShard) {
  for (const bool reshard : {true, false}) {
    expect_same_loop([&](test::BlockNet& model, comm::Communicator& communicator) {
      const FullyShardOptions options{.process_group = borrowed(communicator), .reshard_after_forward = reshard};
      for (test::Block& block : model->blocks) fully_shard(block, options);
      return InFullyShard{fully_shard(model, options)};
    });
  }
}

int64_t regions_of(test::BlockNet& model) {
  take_module_checkpoint_statistics();
  model->loss(test::batch_of(0, 0)).backward();
  return take_module_checkpoint_statistics().regions;
}

TEST(RecomputedModules, TheConfigsChoiceFollowsTheEnginesThreadAndEndsWithTheEngine) {
  run_ranks(1, [](comm::Communicator& communicator) {
    test::BlockNet model;
    test::BlockNet of_the_program;
    apply_activation_checkpointing(*of_the_program, modules_named({"block0"}));
    {
      const auto engine = start(model.ptr(), with_modules(small_config(0, 1), "all"), communicator).engine;
      const auto step = [&] {
        take_module_checkpoint_statistics();
        engine->backward(model->loss(test::batch_of(0, 0)));
        engine->step();
        return take_module_checkpoint_statistics().regions;
      };
      EXPECT_EQ(step(), 3);
      std::thread([&] {
        engine->use_from_this_thread();
        EXPECT_EQ(step(), 3);
      }).join();
      take_module_checkpoint_statistics();
      model->loss(test::batch_of(0, 0));  // another thread is the engine's
      EXPECT_EQ(take_module_checkpoint_statistics().regions, 0);
      engine->use_from_this_thread();
      EXPECT_EQ(step(), 3);
    }
    EXPECT_EQ(regions_of(model), 0);
    EXPECT_EQ(regions_of(of_the_program), 1);
    remove_activation_checkpointing(*of_the_program);
  });
}

TEST(RecomputedModules, WhatTheKeysCannotMeanIsNamed) {
  const auto refused = [](const ordered_json& section, const std::string& text) {
    run_ranks(1, [&](comm::Communicator& communicator) {
      ordered_json config = small_config(1, 1);
      config["activation_checkpointing"] = section;
      EXPECT_THAT([&] { start(test::BlockNet().ptr(), config, communicator); },
                  testing::ThrowsMessage<ConfigError>(HasSubstr(text)));
    });
  };
  refused({{"modules", {"block"}}}, "\"block\"");
  refused({{"modules", {"block[.)"}}}, "regular expression");
  refused({{"recompute", "pointwise"}}, "activation_checkpointing.modules");
  refused({{"modules", {"block0"}}, {"recompute", "products"}}, "pointwise");
}

TEST(RecomputedModules, MatchesWithoutParametersAreLeftOut) {
  run_ranks(1, [](comm::Communicator& communicator) {
    torch::nn::Sequential net(torch::nn::Linear(6, 6), torch::nn::ReLU(), torch::nn::Linear(6, 3));
    ordered_json config = small_config(1, 1);
    config["activation_checkpointing"] = {{"modules", {"1"}}};
    EXPECT_THAT([&] { start(net.ptr(), config, communicator); },
                testing::ThrowsMessage<ConfigError>(HasSubstr("with parameters")));
    config["activation_checkpointing"] = {{"modules", {"\\d"}}};
    const auto engine = start(net.ptr(), config, communicator).engine;
    take_module_checkpoint_statistics();
    engine->backward(net->forward(sample(0, 0)).pow(2).mean());
    EXPECT_EQ(take_module_checkpoint_statistics().regions, 2);
    remove_activation_checkpointing(*net);
  });
}

TEST(RecomputedModules, ThePlanNamesThem) {
  const auto table = [](const ordered_json& section) {
    const ordered_json config = {{"train_batch_size", 2}, {"activation_checkpointing", section}};
    return to_table(make_plan(config::parse(config, {.dp_world_size = 2}), {.world_size = 2, .dp = 2}));
  };
  EXPECT_THAT(table({{"modules", {"h\\.\\d+"}}}), HasSubstr("all of h\\.\\d+"));
  EXPECT_THAT(table({{"modules", {"a", "b"}}, {"recompute", "pointwise"}}), HasSubstr("what is pointwise in a, b"));
}

}  // namespace
}  // namespace ds::engine
