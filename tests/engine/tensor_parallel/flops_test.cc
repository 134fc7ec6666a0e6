// Operations of the example's GPT: those of the formula, whole and in parts of a tensor axis.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <vector>

#include "dsengine/profiling.h"
#include "tests/engine/tensor_parallel/split_training.h"

namespace ds::engine {
namespace {

using profiling::FlopsProfile;
using profiling::ModuleFlops;
using profiling::profile_flops;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

// Of B sequences of S tokens, a layer: 12 h^2 for each token, 2 h for each pair of a sequence.
int64_t forward_macs(const gpt::GptConfig& c, int64_t sequences) {
  const int64_t tokens = sequences * c.seq_len;
  const int64_t layer = 12 * tokens * c.hidden * c.hidden + 2 * tokens * c.seq_len * c.hidden;
  return c.layers * layer + tokens * c.hidden * c.vocab;
}

gpt::GptConfig whole_gpt(bool recompute = false) {
  gpt::GptConfig config = small_gpt();
  config.whole_logits = true;
  config.activation_checkpointing = recompute;
  return config;
}

TEST(FlopsOfAGpt, AreThoseOfTheFormula) {
  for (const bool recompute : {false, true}) {
    SCOPED_TRACE(recompute);
    const GptRun run{.model = whole_gpt(recompute)};
    const auto& [layers, hidden, heads, length] = std::tuple(2, 32, 4, 16);
    const auto net = run.make();
    const GptBatch batch = gpt_batch(0, 0, run.model);
    const FlopsProfile profile = profile_flops(*net, [&] { net->forward(batch.tokens, batch.targets).backward(); });
    const ModuleFlops& all = profile.modules.front();
    EXPECT_EQ(all.macs, forward_macs(run.model, 2));
    // Twice as much, and attention's scores once again.
    const int64_t tokens = 2 * length;
    EXPECT_EQ(all.backward_macs, 2 * all.macs + layers * tokens * length * hidden);
    EXPECT_EQ(all.recomputed_flops > 0, recompute);
    EXPECT_THAT(profile.unknown_operators, ::testing::IsEmpty());
    int found = 0;
    for (const ModuleFlops& module : profile.modules) {
      if (module.name == "h.0.attn") {
        EXPECT_EQ(module.macs, tokens * 4 * hidden * hidden + 2 * tokens * length * hidden) << "with what is between";
        ++found;
      } else if (module.name == "h.1.mlp.fc") {
        EXPECT_EQ(module.backward_macs, 2 * tokens * 4 * hidden * hidden);
        ++found;
      }
    }
    EXPECT_EQ(found, 2);
    EXPECT_THAT(profile.text,
                AllOf(HasSubstr("\nmodel (Gpt): "), HasSubstr("attn (Attention): "), Not(HasSubstr("world size"))));
  }
}

TEST(FlopsOfAGpt, PartsOfATensorAxisAddUp) {
  for (const int stage : {0, 3}) {
    GptRun run{.tensor = 2, .stage = stage, .steps = 2, .model = whole_gpt()};
    run.more["flops_profiler"] = {{"enabled", true}};
    std::vector<FlopsProfile> profiles(2);
    test::run_ranks(run.world(), [&](comm::Communicator& world) {
      const auto net = run.make();
      const auto engine = run.start(world, net).engine;
      run.train(*engine, *net);
      profiles[static_cast<size_t>(world.rank())] = flops_profile(*engine).value();
    });
    const ModuleFlops& first = profiles[0].modules.front();
    const ModuleFlops& second = profiles[1].modules.front();
    EXPECT_EQ(first.macs + second.macs, forward_macs(run.model, 2));
    EXPECT_EQ(first.macs, second.macs);
    EXPECT_EQ(first.backward_macs, second.backward_macs);
    EXPECT_EQ(first.backward_macs + second.backward_macs, 2 * forward_macs(run.model, 2) + 2 * (2 * 16) * 16 * 32);
    // Biases of row layers, norms and positions are whole.
    const int64_t whole = 16 * 32 + 2 * (2 * 2 * 32 + 2 * 32) + 2 * 32;
    const int64_t split = 2 * 50 * 32 + 2 * (12 * 32 * 32 + 3 * 32 + 4 * 32);
    EXPECT_EQ(first.parameters, whole + split / 2);
    EXPECT_THAT(profiles[0].text, testing::ContainsRegex("model parallel size: +2\n"));
  }
}

}  // namespace
}  // namespace ds::engine
