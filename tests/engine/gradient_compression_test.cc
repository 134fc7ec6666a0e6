// gradient_compression in training: what is learnt, what is sent, what a resumed run remembers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "config/plan/plan.h"
#include "core/check.h"
#include "dsengine/engine.h"
#include "tests/model/checkpoint/checkpoint_run.h"
#include "tests/model/small_run.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int kCompressingRanks = 4;

// Matrices large enough for factors and few elements to be less than all.
struct MatrixNetImpl : torch::nn::Module {
  MatrixNetImpl() {
    first = register_module("first", torch::nn::Linear(6, 96));
    middle = register_module("middle", torch::nn::Linear(96, 64));
    last = register_module("last", torch::nn::Linear(64, 3));
    fill(*this);
  }
  at::Tensor loss(const at::Tensor& x) {
    const at::Tensor typed = x.to(first->weight.scalar_type());
    const at::Tensor out = last(torch::tanh(middle(torch::tanh(first(typed))) * 0.2)) * 0.2;
    return (out - typed.narrow(1, 0, 3).sin() * 2.0).pow(2).mean();
  }
  torch::nn::Linear first{nullptr}, middle{nullptr}, last{nullptr};
};
TORCH_MODULE(MatrixNet);

ordered_json compression_config(int stage, const ordered_json& section) {
  ordered_json config = small_config(stage, 1);
  config["optimizer"]["params"] = {{"lr", 5e-3}, {"weight_decay", 0.0}};
  config["zero_optimization"]["reduce_bucket_size"] = 4000;
  if (!section.is_null()) config["gradient_compression"] = section;
  return config;
}

struct CompressedRun {
  std::vector<double> losses;
  int64_t sent = 0;  // by rank 0
  std::string plan;
  int64_t remembered = 0;
};

CompressedRun run_compressed(const ordered_json& config, int64_t steps, int ranks_per_host = 1) {
  CompressedRun run;
  test::run_ranks(kCompressingRanks, [&](comm::Communicator& communicator) {
    MatrixNet model;
    const auto engine = initialize({.model = model.ptr(),
                                    .config = config,
                                    .distributed = Distributed{.ranks = borrowed(communicator),
                                                               .local_rank = communicator.rank(),
                                                               .ranks_per_host = ranks_per_host,
                                                               .device = at::kCPU}})
                            .engine;
    const int64_t accumulation = engine->gradient_accumulation_steps();
    for (int64_t micro = 0; micro < steps * accumulation; ++micro) {
      const at::Tensor loss = engine->backward(model->loss(sample(micro % 5, communicator.rank())));
      engine->step();
      if (communicator.rank() == 0) run.losses.push_back(loss.item<double>());
    }
    if (communicator.rank() == 0) {
      run.sent = engine->comm_bytes_sent();
      run.plan = to_table(engine->plan());
      run.remembered = engine->plan().compression_bytes;
    }
    for (const auto& [name, master] : engine->fp32_state_dict()) {
      const at::Tensor first = master.clone();
      communicator.broadcast(first, 0).wait();
      EXPECT_TRUE(first.equal(master)) << name << " on rank " << communicator.rank();
    }
  });
  return run;
}

double mean_of_last(const CompressedRun& run) {
  double sum = 0;
  for (size_t i = run.losses.size() - 5; i < run.losses.size(); ++i) sum += run.losses[i];
  return sum / 5;
}

constexpr int64_t kCompressedSteps = 60;

TEST(GradientCompression, EveryMethodLearnsInEveryStage) {
  for (const int stage : {0, 1, 2, 3}) {
    const CompressedRun dense = run_compressed(compression_config(stage, nullptr), kCompressedSteps);
    ASSERT_LT(mean_of_last(dense), 0.5 * dense.losses.front());
    for (const char* method : {"int8", "top_k", "power_sgd", "sign", "bf16"}) {
      ordered_json section = {{"method", method}};
      if (method == std::string("top_k")) section["top_k"] = 0.1;
      const CompressedRun found = run_compressed(compression_config(stage, section), kCompressedSteps);
      EXPECT_LT(mean_of_last(found), 0.6 * dense.losses.front()) << method << " stage " << stage;
      EXPECT_LT(found.sent, dense.sent) << method << " stage " << stage;
      if (method == std::string("int8")) {
        for (size_t i = 0; i < dense.losses.size(); ++i) {
          EXPECT_NEAR(found.losses[i], dense.losses[i], 0.05 * dense.losses.front()) << "step " << i;
        }
      }
    }
  }
}

// Stage 0 sends gradients and, for the comparison of ranks, a few numbers a step.
TEST(GradientCompression, CountersShowTheRatio) {
  const auto sent = [](const ordered_json& section) {
    return static_cast<double>(run_compressed(compression_config(0, section), 5).sent);
  };
  const double dense = sent(nullptr);
  EXPECT_NEAR(sent({{"method", "bf16"}}) / dense, 0.5, 0.01);
  EXPECT_NEAR(sent({{"method", "int8"}}) / dense, 0.252, 0.01);
  // 8 bytes an element to 3 others, where an all-reduce sends 6.
  EXPECT_NEAR(sent({{"method", "top_k"}, {"top_k", 0.01}}) / dense, 0.01 * 24 / 6, 0.01);
  EXPECT_LT(sent({{"method", "power_sgd"}, {"rank", 1}}) / dense, 0.1);
  EXPECT_LT(sent({{"method", "sign"}}) / dense, 0.06);
}

TEST(GradientCompression, DenseStepsAreThoseOfAPlainRun) {
  const CompressedRun dense = run_compressed(compression_config(1, nullptr), 12);
  const CompressedRun late =
      run_compressed(compression_config(1, {{"method", "power_sgd"}, {"rank", 1}, {"start_step", 6}}), 12);
  for (size_t i = 0; i <= 6; ++i) EXPECT_EQ(late.losses[i], dense.losses[i]) << i;
  EXPECT_NE(late.losses[8], dense.losses[8]);
}

TEST(GradientCompression, BetweenNodesOnly) {
  const CompressedRun dense = run_compressed(compression_config(0, nullptr), kCompressedSteps);
  for (const int stage : {0, 2, 3}) {
    for (const char* method : {"int8", "top_k", "power_sgd", "sign"}) {
      const ordered_json section = {{"method", method}, {"top_k", 0.1}, {"between_nodes_only", true}};
      const CompressedRun found = run_compressed(compression_config(stage, section), kCompressedSteps, 2);
      EXPECT_LT(mean_of_last(found), 0.6 * dense.losses.front()) << method << " stage " << stage;
      EXPECT_THAT(found.plan, HasSubstr("added as they are on the 2 ranks of a node first"));
    }
  }
  const CompressedRun one_node =
      run_compressed(compression_config(0, {{"method", "int8"}, {"between_nodes_only", true}}), kCompressedSteps, 4);
  EXPECT_EQ(one_node.losses, dense.losses);
  EXPECT_THAT(one_node.plan, HasSubstr("one node holds all ranks"));
}

TEST(GradientCompression, AccumulationAndOffload) {
  for (const int stage : {0, 1, 2, 3}) {
    for (const char* method : {"int8", "power_sgd"}) {
      ordered_json config = compression_config(stage, {{"method", method}});
      config["gradient_accumulation_steps"] = 2;
      if (stage > 0) config["zero_optimization"]["offload_optimizer"] = {{"device", "cpu"}};
      const CompressedRun found = run_compressed(config, kCompressedSteps);
      EXPECT_LT(mean_of_last(found), 0.6 * found.losses.front()) << method << " stage " << stage;
    }
  }
}

TEST(GradientCompression, CopiesOfTheModelStateAndUpdatesInBackward) {
  ordered_json copies = compression_config(2, {{"method", "int8"}});
  copies["zero_optimization"]["mics_shard_size"] = 2;
  ordered_json early = compression_config(2, {{"method", "int8"}});
  early["zero_optimization"]["offload_optimizer"] = {{"device", "cpu"}, {"super_offload", true}};
  for (const ordered_json& config : {copies, early}) {
    const CompressedRun found = run_compressed(config, kCompressedSteps);
    EXPECT_LT(mean_of_last(found), 0.6 * found.losses.front()) << config.dump();
  }
}

TEST(GradientCompression, AClientOptimizer) {
  test::run_ranks(2, [](comm::Communicator& communicator) {
    MatrixNet model;
    ordered_json config = compression_config(0, {{"method", "power_sgd"}});
    config.erase("optimizer");
    const auto optimizer = std::make_shared<torch::optim::Adam>(model->parameters(), 5e-3);
    const auto engine =
        initialize(
            {.model = model.ptr(), .config = config, .optimizer = optimizer, .communicator = borrowed(communicator)})
            .engine;
    std::vector<double> losses;
    for (int64_t step = 0; step < kCompressedSteps; ++step) {
      losses.push_back(engine->backward(model->loss(sample(step % 5, communicator.rank()))).item<double>());
      engine->step();
    }
    EXPECT_LT(losses.back(), 0.6 * losses.front());
  });
}

// Quantised blocks carry an overflow into the padding of a bucket, where it must not stay.
TEST(GradientCompression, SkippedStepsOfQuantizedGradients) {
  ordered_json config = compression_config(1, nullptr);
  config["zero_optimization"]["zero_quantized_gradients"] = true;
  config["fp16"] = {{"enabled", true}, {"initial_scale_power", 24}, {"hysteresis", 1}};
  const CompressedRun found = run_compressed(config, kCompressedSteps + 20);
  EXPECT_LT(mean_of_last(found), 0.6 * found.losses.front());
}

// The scale begins far too high: steps with Inf are skipped, and leave nothing behind.
TEST(GradientCompression, SkippedStepsOfFloat16) {
  for (const char* method : {"int8", "top_k", "power_sgd", "sign"}) {
    ordered_json config = compression_config(1, {{"method", method}, {"top_k", 0.1}});
    config["fp16"] = {{"enabled", true}, {"initial_scale_power", 24}, {"hysteresis", 1}};
    const CompressedRun found = run_compressed(config, kCompressedSteps + 20);
    EXPECT_LT(mean_of_last(found), 0.6 * found.losses.front()) << method;
  }
}

Plan compression_plan(const ordered_json& section, int64_t ranks, int64_t ranks_per_host, ordered_json zero = {}) {
  ordered_json config = {{"train_micro_batch_size_per_gpu", 1}, {"gradient_compression", section}};
  if (!zero.empty()) config["zero_optimization"] = std::move(zero);
  return make_plan(config::parse(config, {.dp_world_size = ranks}),
                   {.world_size = ranks, .dp = ranks, .ranks_per_host = ranks_per_host}, {.parameters = 1000});
}

TEST(GradientCompression, ThePlanDecidesWhatACompressedBucketIs) {
  EXPECT_EQ(compression_plan({{"method", "bf16"}}, 4, 1).communication_dtype, DType::kBFloat16);
  EXPECT_FALSE(compression_plan({{"method", "bf16"}}, 4, 1).compression.compresses());
  const Plan flat = compression_plan({{"method", "int8"}}, 4, 2);
  EXPECT_TRUE(flat.compression.compresses());
  EXPECT_EQ(flat.compression_node_ranks, 1);
  EXPECT_EQ(flat.compression_bytes, 4000);
  const ordered_json between = {{"method", "int8"}, {"between_nodes_only", true}};
  EXPECT_EQ(compression_plan(between, 4, 2).compression_node_ranks, 2);
  EXPECT_EQ(compression_plan(between, 4, 2).compression_bytes, 2000);
  EXPECT_EQ(compression_plan(between, 8, 1, {{"stage", 3}, {"zero_hpz_partition_size", 4}}).compression_node_ranks, 4);
  EXPECT_FALSE(compression_plan(between, 4, 4).compression.compresses());
  EXPECT_FALSE(compression_plan({{"method", "int8"}}, 1, 1).compression.compresses());
  EXPECT_THAT(
      [&] {
        compression_plan(between, 12, 4, {{"stage", 2}, {"mics_shard_size", 6}});
      },
      ::testing::ThrowsMessage<ConfigError>(HasSubstr("gradient_compression.between_nodes_only")));
}

TEST(GradientCompression, ThePlanSaysWhatRunsAndWhatItKeeps) {
  const CompressedRun top_k = run_compressed(compression_config(0, {{"method", "top_k"}}), 1);
  EXPECT_THAT(top_k.plan,
              AllOf(HasSubstr("the largest 1 % of the elements of a bucket"),
                    HasSubstr("gradient_compression.method: top_k"), HasSubstr("remembered from step to step")));
  EXPECT_GE(top_k.remembered, (6 * 96 + 96 + 96 * 64 + 64 + 64 * 3 + 3) * 4);
  const CompressedRun lost = run_compressed(compression_config(0, {{"method", "int8"}, {"error_feedback", false}}), 1);
  EXPECT_THAT(lost.plan, HasSubstr("what is not sent is lost"));
  EXPECT_EQ(lost.remembered, 0);
}

ordered_json resumed_config(int stage, int world, const char* method) {
  ordered_json config = carried_config(stage, world);
  config["gradient_compression"] = {{"method", method}, {"rank", 2}, {"top_k", 0.1}};
  return config;
}

TEST(GradientCompression, AResumedRunGoesOnBitByBit) {
  for (const int stage : {0, 2, 3}) {
    for (const char* method : {"int8", "top_k", "power_sgd", "sign"}) {
      const test::ScratchFolder folder;
      test::run_ranks(2, [&](comm::Communicator& communicator) {
        const ordered_json config = resumed_config(stage, 2, method);
        State expected;
        {
          CarriedNet model;
          const auto engine = start(model.ptr(), config, communicator).engine;
          train_until(*engine, model, 4);
          engine->save_checkpoint(folder.path().string());
          expected = train_until(*engine, model, 9);
          // Back to it, with the memory of later steps.
          engine->load_checkpoint(folder.path().string());
          EXPECT_EQ(largest_difference(train_until(*engine, model, 9), expected), 0) << method << " " << stage;
        }
        CarriedNet model;
        const auto engine = start(model.ptr(), config, communicator).engine;
        engine->load_checkpoint(folder.path().string());
        EXPECT_EQ(largest_difference(train_until(*engine, model, 9), expected), 0) << method << " " << stage;
      });
    }
  }
}

TEST(GradientCompression, AnotherNumberOfRanksBeginsWithoutMemory) {
  const test::ScratchFolder folder;
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    CarriedNet model;
    const auto engine = start(model.ptr(), resumed_config(1, 2, "power_sgd"), communicator).engine;
    train_until(*engine, model, 4);
    engine->save_checkpoint(folder.path().string());
  });
  test::run_ranks(3, [&](comm::Communicator& communicator) {
    CarriedNet model;
    const auto engine = start(model.ptr(), resumed_config(1, 3, "power_sgd"), communicator).engine;
    train_until(*engine, model, 2);
    engine->load_checkpoint(folder.path().string());
    const State found = train_until(*engine, model, 6);
    CarriedNet fresh;
    const auto other = start(fresh.ptr(), resumed_config(1, 3, "power_sgd"), communicator).engine;
    other->load_checkpoint(folder.path().string());
    EXPECT_EQ(largest_difference(train_until(*other, fresh, 6), found), 0);
  });
}

}  // namespace
}  // namespace ds::engine
