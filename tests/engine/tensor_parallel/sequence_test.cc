// Megatron's sequence parallelism in the engine: whole parameters get sums of what ranks of the tensor axis have.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/check.h"
#include "tests/engine/tensor_parallel/split_training.h"
#include "tests/support/grid.h"

namespace ds::engine {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

nlohmann::json cut_sequences(bool overlap = false) {
  return {{"tensor_parallel", {{"sequence_parallel", true}, {"tp_overlap_comm", overlap}}}};
}

TEST(SequenceParallelEngine, TrainsAsPlainTorch) {
  for (const auto& [tensor, stage, data, tied] :
       test::grid_sample(2, std::vector{2, 4}, std::vector{0, 1, 2, 3}, std::vector{1, 2}, std::vector{false, true})) {
    SCOPED_TRACE(testing::Message() << "tensor " << tensor << ", stage " << stage << ", data " << data << ", tied "
                                    << tied);
    expect_same_as_plain(
        {.tensor = tensor, .data = data, .stage = stage, .model = small_gpt(tied), .more = cut_sequences(tied)});
  }
}

TEST(SequenceParallelEngine, WithRecomputationAccumulationAndOffload) {
  GptRun run{.data = 2, .stage = 3, .accumulation = 2, .more = cut_sequences(true)};
  run.model.activation_checkpointing = true;
  expect_same_as_plain(run);
  GptRun offloaded{.data = 2, .stage = 2, .more = cut_sequences()};
  offloaded.more["zero_optimization"]["offload_optimizer"]["device"] = "cpu";
  expect_same_as_plain(offloaded);
}

TEST(SequenceParallelEngine, VerifiesWhatItComputes) {
  GptRun run{.tensor = 2, .stage = 1, .steps = 2, .more = cut_sequences()};
  run.more["tensor_parallel"]["verify"] = true;
  expect_same_as_plain(run);
}

// A program that looks at gradients, or clips, between backward() and step() finds the whole's; further passes add up.
TEST(SequenceParallelEngine, GradientsAreWholeWhenTheyAreAskedFor) {
  for (const int stage : {0, 2}) {
    const GptRun run{.tensor = 2, .data = 1, .stage = stage, .more = cut_sequences()};
    const auto plain = run.make();
    const GptBatch first = gpt_batch(0, 0, run.model);
    const GptBatch second = gpt_batch(1, 0, run.model);
    plain->forward(first.tokens, first.targets).backward();
    const at::Tensor once = plain->named_parameters()["ln_f.weight"].grad().clone();
    plain->forward(second.tokens, second.targets).backward();
    const at::Tensor twice = plain->named_parameters()["ln_f.weight"].grad().clone();
    test::run_ranks(run.world(), [&](comm::Communicator& world) {
      const auto net = run.make();
      const auto engine = run.start(world, net).engine;
      const at::Tensor weight = net->named_parameters()["ln_f.weight"];
      engine->backward(net->forward(first.tokens, first.targets));
      EXPECT_TRUE(at::allclose(engine->safe_get_full_grad(weight), once, 1e-5, 1e-7)) << "stage " << stage;
      EXPECT_TRUE(at::allclose(engine->safe_get_full_grad(weight), once, 1e-5, 1e-7)) << "asked again";
      engine->backward(net->forward(second.tokens, second.targets));
      EXPECT_TRUE(at::allclose(engine->safe_get_full_grad(weight), twice, 1e-5, 1e-7)) << "stage " << stage;
      engine->safe_set_full_grad(weight, at::zeros_like(twice));
      engine->clip_grad_norm_(1e9);
      EXPECT_EQ(engine->safe_get_full_grad(weight).count_nonzero().item<int64_t>(), 0);
      engine->step();
    });
  }
}

TEST(SequenceParallelEngine, ScopesShowWholeParametersAsMemory) {
  const GptRun run{.tensor = 2, .data = 1, .stage = 3, .more = cut_sequences()};
  test::run_ranks(run.world(), [&](comm::Communicator& world) {
    const auto net = run.make();
    const auto reference = run.make();
    const auto engine = run.start(world, net).engine;
    const at::Tensor weight = net->named_parameters()["ln_f.weight"];
    const at::Tensor expected = reference->named_parameters()["ln_f.weight"].detach();
    {
      const auto scope = engine->gathered_parameters({weight}, 0);
      EXPECT_TRUE(at::equal(weight.detach(), expected));
      EXPECT_NE(weight.const_data_ptr(), nullptr);
      const at::NoGradGuard no_grad;
      if (engine->communicator().rank() == 0) at::Tensor(weight).mul_(3);
    }
    EXPECT_TRUE(at::allclose(engine->safe_get_full_fp32_param(weight), expected * 3));
  });
}

TEST(SequenceParallelEngine, AnUpdateBesideBackwardIsRefusedByName) {
  GptRun run{.data = 1, .stage = 2, .more = cut_sequences()};
  run.more["zero_optimization"]["offload_optimizer"] = {{"device", "cpu"}, {"super_offload", true}};
  test::run_ranks(run.world(), [&](comm::Communicator& world) {
    EXPECT_THAT([&] { run.start(world, run.make()); },
                ThrowsMessage<ConfigError>(HasSubstr("excludes offload_optimizer.super_offload")));
  });
}

}  // namespace
}  // namespace ds::engine
