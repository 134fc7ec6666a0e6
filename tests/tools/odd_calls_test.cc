// ds-tool, called as people call it who do not know it yet.
#include <gmock/gmock.h>

#include <string>
#include <vector>

#include "tests/support/scratch_folder.h"
#include "tools/report/child_process.h"

namespace ds::tool {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

report::Finished run_tool(std::vector<std::string> words) {
  words.insert(words.begin(), DS_TOOL);
  return report::run_child(words, std::chrono::seconds(60));
}

TEST(OddCalls, AWordThatIsNoCommandIsNamedAndCommandsAreListed) {
  const report::Finished run = run_tool({"nope"});
  EXPECT_FALSE(run.fine);
  EXPECT_THAT(run.err, AllOf(HasSubstr("found \"nope\""), HasSubstr("\n  check "), HasSubstr("\n  bench ")));
  EXPECT_THAT(run_tool({"chek"}).err, HasSubstr("did you mean check?"));
  EXPECT_THAT(run_tool({}).err, AllOf(HasSubstr("found nothing"), HasSubstr("\n  simulate ")));
  EXPECT_THAT(run_tool({"a\x1b[2J"}).err, AllOf(HasSubstr("\\x1B"), Not(HasSubstr("\x1b"))));
}

TEST(OddCalls, HelpHelps) {
  const report::Finished all = run_tool({"help"});
  EXPECT_TRUE(all.fine) << all.err;
  EXPECT_THAT(all.out, AllOf(HasSubstr("simulate"), HasSubstr("checkpoint")));
  EXPECT_EQ(run_tool({"--help"}).out, all.out);
  EXPECT_EQ(run_tool({"help", "check"}).out, run_tool({"check", "--help"}).out);
}

TEST(OddCalls, NumbersAreTakenAsPeopleTypeThem) {
  const test::ScratchFolder folder;
  const std::string config = folder.write("c.json", R"({"train_batch_size": 8, "optimizer": {"type": "AdamW"}})");
  const report::Finished run = run_tool({"check", config, "--parameters", "1e9", "--world_size", "4.0"});
  EXPECT_TRUE(run.fine) << run.err;
  EXPECT_THAT(run.out, AllOf(HasSubstr("4 ranks"), HasSubstr("4000000000")));
  EXPECT_TRUE(run_tool({"simulate", config, "--ranks", "2e0", "--parameters", "1e9", "--flops", "1e12", "--tflops",
                        "1e2", "--link_gbps", "1e2", "--layers", "1e1"})
                  .fine);
  EXPECT_TRUE(run_tool({"schedule", "--kind", "1f1b", "--stages", "4", "--micro_batches", "1e1"}).fine);
}

// DeepSpeed's users know the one, users of simulate the other.
TEST(OddCalls, TheNumberOfRanksHasTwoNamesEverywhere) {
  const test::ScratchFolder folder;
  const std::string config = folder.write("c.json", R"({"train_batch_size": 8, "optimizer": {"type": "AdamW"}})");
  EXPECT_EQ(run_tool({"check", config, "--ranks", "2"}).out, run_tool({"check", config, "--world_size", "2"}).out);
  const auto simulated = [&](const char* name) {
    return run_tool({"simulate", config, name, "2", "--parameters", "1e9", "--flops", "1e12", "--tflops", "1e2",
                     "--link_gbps", "1e2", "--layers", "1e1"});
  };
  EXPECT_TRUE(simulated("--world_size").fine) << simulated("--world_size").err;
  EXPECT_EQ(simulated("--world_size").out, simulated("--ranks").out);
}

TEST(OddCalls, NegativeLimitsAreRefusedInAFewWords) {
  const auto refusal = [](const std::vector<std::string>& words) {
    const report::Finished run = run_tool(words);
    EXPECT_FALSE(run.fine);
    EXPECT_LT(run.err.size(), 200U) << run.err;
    return run.err;
  };
  EXPECT_THAT(refusal({"explain", "--dead_after", "-1"}), HasSubstr("--dead_after: expected a number of at least 0"));
  EXPECT_THAT(refusal({"explain", "--entries", "-1"}), HasSubstr("--entries: expected a whole number from 0"));
  EXPECT_THAT(refusal({"checkpoint", "diff", "a", "b", "--tolerance", "-1"}),
              HasSubstr("--tolerance: expected a number of at least 0, found -1"));
  EXPECT_THAT(refusal({"bench", "--iterations", "-1"}), HasSubstr("--iterations: expected a whole number from 1"));
}

}  // namespace
}  // namespace ds::tool
