#include "launcher/ranks/failure_report.h"

#include <gmock/gmock.h>
#include <sys/wait.h>

#include <csignal>
#include <string>

#include "core/text.h"

namespace ds::launcher {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

int ended_with(int code) { return W_EXITCODE(code, 0); }
int killed_by(int signal) { return W_EXITCODE(0, signal); }

TEST(FailureReport, NamesRankCauseAndMemory) {
  const Failure failure{.rank = 3, .pid = 4711, .status = ended_with(1), .peak_rss_bytes = 3LL << 29};
  EXPECT_EQ(cause_line(failure), "rank 3 (pid 4711) failed: exit code 1; peak memory 1.5 GiB");
}

TEST(FailureReport, RecognisesAnOutOfMemoryKill) {
  Failure failure{.rank = 0, .pid = 1, .status = killed_by(SIGKILL)};
  failure.before.group_kills = 2;
  failure.after = {.group_kills = 3, .host_kills = {}, .group_limit = 512 << 20};
  EXPECT_THAT(cause_line(failure),
              HasSubstr("by the kernel's out-of-memory killer, because the control group reached its "
                        "memory limit of 512 MiB"));
  failure.status = ended_with(137);  // a shell whose last command was killed
  EXPECT_THAT(cause_line(failure), HasSubstr("out-of-memory killer"));
  failure.after.group_kills = 2;
  failure.status = killed_by(SIGKILL);
  EXPECT_THAT(cause_line(failure), HasSubstr("by another process"));
  failure.before = failure.after = {};
  EXPECT_THAT(cause_line(failure), HasSubstr("the kernel does not tell"));
}

TEST(FailureReport, ShowsTheLastLines) {
  LastLines lines;
  EXPECT_THAT(last_lines_report({.rank = 1}, lines), ElementsAre("rank 1 had written nothing"));
  lines.add("hello");
  EXPECT_THAT(last_lines_report({.rank = 1}, lines), ElementsAre("last lines of rank 1:", "  | hello"));
}

TEST(FailureReport, TellsAConsequenceFromACause) {
  const auto tells = [](const std::vector<std::string>& written) {
    LastLines lines;
    for (const std::string& line : written) lines.add(line);
    return tells_of_another_rank(lines);
  };
  EXPECT_FALSE(tells({}));
  EXPECT_FALSE(tells({"train: error: data.txt: cannot be read"}));
  EXPECT_TRUE(tells({"step 3",
                     "train: error: job rank 1: barrier cannot finish: rank 0 has destroyed its communicator; "
                     "rank 0 (process 7, alive; last began barrier)",
                     ""}));
  for (const char* text :
       {"save_16bit_model: rank 0 could not write /out/model.safetensors, its message says why",
        "load_checkpoint: /saves: another rank could not load it, its message says why",
        "activation_checkpointing.modules: rank 1 could not choose its modules; its error says why",
        "job: rank 0 could not create the shared memory, 4096 bytes; its own error says why",
        "step(): ranks of another tensor axis do not agree; their message says which, and on what"}) {
    EXPECT_TRUE(tells({cat("train: error: ", text)})) << text;
  }
  EXPECT_FALSE(tells({"train: error: /out/model.safetensors cannot be written (No space left on device)"}));
  EXPECT_TRUE(tells({"  what():  [/pytorch/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:5"}));
  // A warning of long ago.
  EXPECT_FALSE(tells({"rank 3 has died", "restored", "step 1", "step 2", "step 3", "error: no space left"}));
}

// LibTorch writes the sentence first, then 60 frames.
TEST(FailureReport, StackFramesDoNotDriveOutTheCause) {
  LastLines lines;
  lines.add("terminate called after throwing an instance of 'c10::Error'");
  lines.add("  what():  mat1 and mat2 shapes cannot be multiplied (4x9 and 8x8)");
  for (int frame = 0; frame < 64; ++frame) {
    lines.add("frame #" + std::to_string(frame) +
              ": at::native::addmm_out(at::Tensor&) + 0x1c (0x7f00 in libtorch_cpu.so)");
  }
  lines.add("frame #: of a picture");
  EXPECT_THAT(last_lines_report({.rank = 0}, lines),
              ElementsAre("last lines of rank 0 (without 64 stack frames):", HasSubstr("terminate called"),
                          HasSubstr("shapes cannot be multiplied"), "  | frame #: of a picture"));
}

TEST(FailureReport, StackFramesAloneAreNotNothing) {
  LastLines lines;
  lines.add("frame #0: <unknown function> + 0x29d90 (0x7f12 in /lib/x86_64-linux-gnu/libc.so.6)");
  EXPECT_THAT(last_lines_report({.rank = 2}, lines), ElementsAre("rank 2 had written 1 stack frames and nothing else"));
  lines.add("hello");
  EXPECT_THAT(last_lines_report({.rank = 2}, lines),
              ElementsAre("last lines of rank 2 (without 1 stack frames):", "  | hello"));
}

TEST(FailureReport, WritesListsOfRanks) {
  EXPECT_EQ(rank_list_text({4}), "rank 4");
  EXPECT_EQ(rank_list_text({0, 1, 2, 5}), "ranks 0-2, 5");
}

}  // namespace
}  // namespace ds::launcher
