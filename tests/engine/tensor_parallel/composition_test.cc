// What works on a rank's parts as on whole parameters: precisions, offload, copies, compression, recomputation.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/check.h"
#include "tests/engine/tensor_parallel/split_training.h"
#include "tests/support/grid.h"

namespace ds::engine {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(TensorParallelWith, Accumulation) { expect_same_as_plain({.data = 2, .stage = 2, .accumulation = 3}); }

TEST(TensorParallelWith, ActivationCheckpointing) {
  GptRun run{.data = 2, .stage = 3};
  run.model.activation_checkpointing = true;
  expect_same_as_plain(run);
}

TEST(TensorParallelWith, HostOffload) {
  expect_same_as_plain(
      {.data = 2,
       .stage = 3,
       .more = {{"zero_optimization",
                 {{"offload_optimizer", {{"device", "cpu"}}}, {"offload_param", {{"device", "cpu"}}}}}}});
}

TEST(TensorParallelWith, AHostUpdateBesideBackward) {
  expect_same_as_plain(
      {.data = 2,
       .stage = 2,
       .more = {{"zero_optimization", {{"offload_optimizer", {{"device", "cpu"}, {"super_offload", true}}}}}}});
}

TEST(TensorParallelWith, CopiesOfTheModelState) {
  expect_same_as_plain({.data = 4, .stage = 3, .more = {{"zero_optimization", {{"mics_shard_size", 2}}}}});
}

TEST(TensorParallelWith, SecondaryCopies) {
  expect_same_as_plain({.data = 4, .stage = 3, .more = {{"zero_optimization", {{"zero_hpz_partition_size", 2}}}}});
}

TEST(TensorParallelWith, BFloat16) {
  expect_same_as_one_rank({.data = 2, .stage = 3, .more = {{"bf16", {{"enabled", true}}}}}, 5e-3, 5e-2);
  expect_same_as_one_rank({.data = 2, .stage = 1, .more = {{"bf16", {{"enabled", true}}}}}, 5e-3, 5e-2);
}

TEST(TensorParallelWith, MastersOf16Bits) {
  for (const int stage : {1, 3}) {
    GptRun run{.data = 2, .stage = stage};
    run.more["bf16"] = {{"enabled", true}, {"bf16_master_weights_and_grads", true}, {"bf16_optimizer_states", true}};
    run.more["optimizer"]["params"]["betas"] = {0.9, 0.95};
    expect_same_as_one_rank(run, 2e-2, 1e-1);
  }
}

TEST(TensorParallelWith, Float16AndALossScale) {
  for (const auto& [tensor, stage, sequences] :
       test::grid_sample(2, std::vector{2, 4}, std::vector{0, 1, 2, 3}, std::vector{false, true})) {
    SCOPED_TRACE(testing::Message() << "tensor " << tensor << ", stage " << stage << ", sequences " << sequences);
    GptRun run{.tensor = tensor, .data = 4 / tensor, .stage = stage, .model = small_gpt(/*tied=*/sequences)};
    run.more["fp16"] = {{"enabled", true}, {"initial_scale_power", 10}};
    run.more["tensor_parallel"]["sequence_parallel"] = sequences;
    expect_same_as_one_rank(run, 5e-3, 5e-2);
  }
}

// All ranks of the axis skip the same steps: the scale is too large at first.
TEST(TensorParallelWith, Float16ThatOverflows) {
  GptRun run{.stage = 1, .steps = 4};
  run.more["fp16"] = {{"enabled", true}, {"initial_scale_power", 24}, {"hysteresis", 1}};
  test::run_ranks(run.world(), [&](comm::Communicator& world) {
    const auto net = run.make();
    const auto engine = run.start(world, net).engine;
    run.train(*engine, *net);
    EXPECT_GT(engine->skipped_steps(), 0);
    at::Tensor facts = at::tensor({engine->loss_scale(), static_cast<double>(engine->skipped_steps())}, at::kDouble);
    const at::Tensor own = facts.clone();
    world.all_reduce(facts).wait();
    EXPECT_TRUE(at::equal(facts, own * world.size())) << "all ranks have the same";
  });
}

TEST(TensorParallelWith, Autocast) {
  expect_same_as_one_rank(
      {.data = 1, .stage = 0, .more = {{"torch_autocast", {{"enabled", true}, {"dtype", "bfloat16"}}}}}, 5e-3, 5e-2);
}

// After the freeze the scales of one bit an element are those of other buckets: as good, not the same.
TEST(TensorParallelWith, OneBitAdamBeforeTheFreezeAndAfter) {
  GptRun run{.data = 2, .stage = 0, .steps = 4};
  run.more = {{"gradient_clipping", 0.0},
              {"optimizer", {{"type", "OneBitAdam"}, {"params", {{"lr", 1e-3}, {"freeze_step", 4}}}}}};
  expect_same_as_one_rank(run, 5e-6, 2e-5);
  run.steps = 12;
  expect_same_as_one_rank(run, 1e-2, 0.2);
}

// While all steps exchange whole gradients, and when few do.
TEST(TensorParallelWith, ZeroOneAdamBeforeTheFreezeAndAfter) {
  GptRun run{.data = 2, .stage = 0, .steps = 10};
  run.more = {{"gradient_clipping", 0.0},
              {"optimizer", {{"type", "ZeroOneAdam"}, {"params", {{"lr", 1e-3}, {"var_freeze_step", 100}}}}}};
  expect_same_as_one_rank(run, 5e-6, 2e-5);
  run.steps = 14;
  run.more["optimizer"]["params"]["var_freeze_step"] = 4;
  expect_same_as_one_rank(run, 1e-2, 0.2);
}

TEST(TensorParallelWith, ZeroPlusPlus) {
  GptRun run{.data = 2, .stage = 3};
  run.more = {{"zero_optimization", {{"zero_quantized_weights", true}, {"zero_quantized_gradients", true}}}};
  expect_same_as_one_rank(run, 2e-2, 0.5);
}

TEST(TensorParallelWith, CompressedGradients) {
  GptRun run{.data = 2, .stage = 1};
  run.more = {{"gradient_compression", {{"method", "int8"}}}};
  expect_same_as_one_rank(run, 2e-3, 0.1);
}

// Trust coefficients are of whole tensors.
TEST(TensorParallelWith, Lamb) {
  for (const int stage : {0, 2}) {
    GptRun run{.data = 2, .stage = stage};
    run.more = {{"optimizer", {{"type", "Lamb"}, {"params", {{"lr", 5e-3}, {"weight_decay", 0.01}}}}},
                {"zero_allow_untested_optimizer", true}};
    expect_same_as_one_rank(run, 1e-5, 1e-4);
  }
}

// Matrices are orthogonalised whole.
TEST(TensorParallelWith, Muon) {
  for (const int stage : {0, 2}) {
    GptRun run{.data = 2, .stage = stage};
    run.more = {{"optimizer", {{"type", "Muon"}, {"params", {{"lr", 5e-3}}}}}};
    expect_same_as_one_rank(run, 1e-4, 1e-3);
  }
}

TEST(TensorParallelWith, MuonOfHeads) {
  GptRun run{.data = 2, .stage = 2};
  run.more = {{"optimizer", {{"type", "Muon"}, {"params", {{"lr", 5e-3}, {"per_head_muon", true}, {"head_dim", 8}}}}}};
  expect_same_as_one_rank(run, 1e-4, 1e-3);
}

TEST(TensorParallelWith, MuonOfUnevenPartsIsRefusedByName) {
  GptRun run{.data = 2, .stage = 2, .model = small_gpt(/*tied=*/true)};
  run.model.vocab = 500;
  run.more = {{"optimizer", {{"type", "Muon"}, {"params", {{"lr", 5e-3}}}}},
              {"zero_optimization", {{"reduce_bucket_size", 100000}}}};
  auto rules = gpt_rules(run.model);
  rules.back().grain = 100;  // 300 entries and 200: slices of the ranks begin in different matrices
  test::run_ranks(4, [&](comm::Communicator& world) {
    EXPECT_THAT(
        [&] {
          initialize({.model = run.make(),
                      .config = run.config(),
                      .split = rules,
                      .communicator = {std::shared_ptr<void>(), &world}});
        },
        ThrowsMessage<ConfigError>(AllOf(HasSubstr("optimizer.type: Muon"), HasSubstr("uneven"))));
  });
}

TEST(TensorParallelWith, WhatNeedsWholeTensorsIsRefusedByName) {
  test::run_ranks(2, [&](comm::Communicator& world) {
    GptRun run;
    run.more = {{"optimizer", {{"type", "OneBitLamb"}}}};
    EXPECT_THAT([&] { run.start(world, run.make()); },
                ThrowsMessage<ConfigError>(AllOf(HasSubstr("tensor_parallel.autotp_size: 2 excludes"),
                                                 HasSubstr("optimizer.type: OneBitLamb"))));
  });
}

// It holds this rank's parts of what it was made of.
TEST(TensorParallelWith, AProgramsOwnOptimizer) {
  for (const int stage : {0, 2}) {
    const GptRun run{.data = 2, .stage = stage};
    const Curve expected = run.plain();
    test::run_ranks(run.world(), [&](comm::Communicator& world) {
      const auto net = run.make();
      const auto own =
          std::make_shared<torch::optim::AdamW>(net->parameters(), torch::optim::AdamWOptions(2e-3).weight_decay(0.01));
      const auto engine = initialize({.model = net,
                                      .config = run.config(),
                                      .optimizer = own,
                                      .split = gpt_rules(run.model),
                                      .communicator = {std::shared_ptr<void>(), &world}})
                              .engine;
      expect_same(run.train(*engine, *net), expected, 5e-6, 2e-5);
    });
  }
}

// Its accumulators have a value before the first step, of the whole of each parameter.
TEST(TensorParallelWith, AProgramsOwnOptimizerThatHasStates) {
  GptRun run{.data = 1, .stage = 1, .steps = 4};
  std::vector<double> expected;
  {
    const auto net = run.make();
    torch::optim::Adagrad adagrad(net->parameters(), torch::optim::AdagradOptions(0.01).initial_accumulator_value(0.1));
    for (int step = 0; step < run.steps; ++step) {
      adagrad.zero_grad();
      const GptBatch batch = gpt_batch(step, 0, run.model);
      const at::Tensor loss = net->forward(batch.tokens, batch.targets);
      loss.backward();
      torch::nn::utils::clip_grad_norm_(net->parameters(), 0.5);
      adagrad.step();
      expected.push_back(loss.item<double>());
    }
  }
  test::run_ranks(run.world(), [&](comm::Communicator& world) {
    const auto net = run.make();
    const auto own = std::make_shared<torch::optim::Adagrad>(
        net->parameters(), torch::optim::AdagradOptions(0.01).initial_accumulator_value(0.1));
    const auto engine = initialize({.model = net,
                                    .config = run.config(),
                                    .optimizer = own,
                                    .split = gpt_rules(run.model),
                                    .communicator = {std::shared_ptr<void>(), &world}})
                            .engine;
    const Curve found = run.train(*engine, *net);
    for (size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(found.losses[i], expected[i], 5e-6);
  });
}

TEST(TensorParallelWith, AProgramsOwnOptimizerOfWholeParametersIsRefusedByName) {
  test::run_ranks(2, [&](comm::Communicator& world) {
    const GptRun run;
    const auto net = run.make();
    const auto own = std::make_shared<torch::optim::LBFGS>(net->parameters());
    EXPECT_THAT(
        [&] {
          initialize({.model = net,
                      .config = run.config(),
                      .optimizer = own,
                      .split = gpt_rules(run.model),
                      .communicator = {std::shared_ptr<void>(), &world}});
        },
        ThrowsMessage<ConfigError>(AllOf(HasSubstr("LBFGS"), HasSubstr("tensor_parallel"))));
  });
}

// Forward only: all parameters are frozen.
TEST(TensorParallelWith, EvaluationWithoutAnOptimizer) {
  const GptRun run;
  const GptBatch batch = gpt_batch(0, 0, run.model);
  const double expected = run.make()->forward(batch.tokens, batch.targets).item<double>();
  test::run_ranks(2, [&](comm::Communicator& world) {
    nlohmann::json config = run.config();
    config.erase("optimizer");
    const auto net = run.make();
    const auto engine = initialize({.model = net,
                                    .config = config,
                                    .split = gpt_rules(run.model),
                                    .communicator = {std::shared_ptr<void>(), &world}})
                            .engine;
    const at::Tensor loss = net->forward(batch.tokens, batch.targets);
    EXPECT_FALSE(loss.requires_grad());
    EXPECT_NEAR(loss.item<double>(), expected, 1e-6);
  });
}

}  // namespace
}  // namespace ds::engine
