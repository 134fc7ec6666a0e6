// Gradients of several backward passes before they are reduced.
#include <gtest/gtest.h>

#include "tests/engine/tensor_parallel/split_training.h"
#include "tests/support/grid.h"

namespace ds::engine {
namespace {

// Two of three backward passes of a step send nothing to data-parallel ranks.
Curve train_with_no_sync(const GptRun& run, Engine& engine, gpt::Gpt& net) {
  Curve curve;
  for (int step = 0; step < run.steps; ++step) {
    at::Tensor sum = at::zeros({1}, at::kDouble);
    for (int micro = step * run.accumulation; micro < (step + 1) * run.accumulation; ++micro) {
      const GptBatch batch = gpt_batch(micro, engine.communicator().rank(), run.model);
      const at::Tensor loss = net.forward(batch.tokens, batch.targets);
      const bool last = micro == (step + 1) * run.accumulation - 1;
      if (last) {
        sum += engine.backward(loss).to(at::kDouble);
        engine.step();
      } else {
        const auto guard = engine.no_sync();
        const int64_t before = engine.communicator().counters().total_bytes_sent();
        sum += engine.backward(loss).to(at::kDouble);
        EXPECT_EQ(engine.communicator().counters().total_bytes_sent(), before);
      }
    }
    engine.communicator().all_reduce(sum).wait();
    curve.losses.push_back(sum.item<double>() / engine.dp_world_size());
    curve.norms.push_back(engine.get_global_grad_norm().value_or(-1));
  }
  return curve;
}

TEST(TensorParallelAccumulation, WithoutSums) {
  for (const auto& [stage, sequences, tied] :
       test::grid_sample(2, std::vector{0, 1, 2, 3}, std::vector{false, true}, std::vector{false, true})) {
    SCOPED_TRACE(testing::Message() << "stage " << stage << ", sequences " << sequences << ", tied " << tied);
    GptRun run{.data = 2,
               .stage = stage,
               .steps = test::whole_grid_wanted() ? 10 : 4,
               .accumulation = 3,
               .model = small_gpt(tied)};
    run.more["managed_gradient_accumulation"] = false;
    run.more["tensor_parallel"]["sequence_parallel"] = sequences;
    const Curve expected = run.plain();
    test::run_ranks(run.world(), [&](comm::Communicator& world) {
      const auto net = run.make();
      const auto engine = run.start(world, net).engine;
      expect_same(train_with_no_sync(run, *engine, *net), expected, 5e-6, 2e-5);
      EXPECT_TRUE(engine->joined_operators().empty());
    });
  }
}

}  // namespace
}  // namespace ds::engine
