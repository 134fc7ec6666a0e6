// What a rank of a tensor axis holds of the model's state is what the plan predicts: parts, and what stays whole.
#include <gtest/gtest.h>

#include "parallel/split_module.h"
#include "profiling/tensor_memory.h"
#include "tests/engine/tensor_parallel/split_training.h"
#include "tests/support/grid.h"

namespace ds::engine {
namespace {

// Of one part of the model: one T-th of what is split, here all of it evenly, and all else.
int64_t elements_of_part(const GptRun& run) {
  const auto net = run.make();
  const auto split = parallel::plan_module(*net, gpt_rules(run.model), run.tensor);
  int64_t elements = 0;
  const auto parameters = net->named_parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    elements += parameters[i].value().numel() / (split[i].is_split() ? run.tensor : 1);
  }
  return elements;
}

TEST(TensorParallelStateBytes, AreThePredictedOnes) {
  for (const auto& [tensor, stage, precision, sequences] :
       test::grid_sample(2, std::vector{2, 4}, std::vector{0, 1, 2, 3},
                         std::vector<std::string>{"fp32", "bf16", "bf16 masters"}, std::vector{false, true})) {
    SCOPED_TRACE(testing::Message() << "tensor " << tensor << ", stage " << stage << ", " << precision << ", sequences "
                                    << sequences);
    GptRun run{.tensor = tensor, .data = 4 / tensor, .stage = stage, .steps = 2};
    run.model.vocab = 52;
    const bool narrow = precision != "fp32";
    if (narrow) run.more["bf16"]["enabled"] = true;
    const bool narrow_masters = precision == "bf16 masters" && stage > 0;
    if (narrow_masters)
      run.more["bf16"].update({{"bf16_master_weights_and_grads", true}, {"bf16_optimizer_states", true}});
    run.more["tensor_parallel"]["sequence_parallel"] = sequences;
    const int64_t elements = elements_of_part(run);
    test::run_ranks(run.world(), [&](comm::Communicator& world) {
      const auto net = run.make();
      const auto engine = run.start(world, net).engine;
      run.train(*engine, *net);
      const Engine::ModelStateBytes measured = engine->model_state_bytes();
      const zero::ModelStateBytes& predicted = *engine->plan().bytes;
      EXPECT_EQ(measured.parameters, predicted.parameters);
      // Parts and what is whole have buckets of their own: where reduced ones are dropped, one more may be open.
      const int64_t bucket = stage < 2 ? 0 : 5000 * (narrow ? 2 : 4);
      EXPECT_GE(measured.gradients, predicted.gradients);
      EXPECT_LE(measured.gradients, predicted.gradients + bucket);
      EXPECT_EQ(measured.master, predicted.master);
      if (narrow_masters) EXPECT_EQ(measured.master, 0);
      EXPECT_EQ(measured.optimizer, predicted.optimizer);
      EXPECT_EQ(engine->plan().parameters, elements);
      if (stage > 0) return;
      const int64_t weights = elements * (narrow ? 2 : 4);  // and buckets have whole cache lines
      EXPECT_GE(measured.parameters, weights);
      EXPECT_LT(measured.parameters, weights + weights / 50);
      EXPECT_GE(measured.optimizer, elements * 8);
      EXPECT_LT(measured.optimizer, elements * 8 + elements * 8 / 50);
    });
  }
}

// The module's own parameters have no memory: LibTorch's allocators count the state and nothing beside.
TEST(TensorParallelStateBytes, AreAllThatIsThere) {
  for (const int stage : {0, 3}) {
    GptRun run{.tensor = 2, .stage = stage, .steps = 3};
    run.model = {.layers = 2, .hidden = 128, .heads = 4, .seq_len = 16, .vocab = 256};
    run.more["zero_optimization"]["reduce_bucket_size"] = 100'000;
    test::run_ranks(run.world(), [&](comm::Communicator& world) {
      const profiling::TensorMemory memory;
      const auto net = run.make();
      const auto engine = run.start(world, net).engine;
      run.train(*engine, *net);
      engine->synchronize_parameters();
      const auto predicted = static_cast<double>(engine->plan().bytes->total());
      EXPECT_NEAR(static_cast<double>(memory.live_bytes()) / predicted, 1.0, 0.02) << "stage " << stage;
    });
  }
}

}  // namespace
}  // namespace ds::engine
