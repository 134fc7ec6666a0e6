#include "launcher/options.h"

#include <gmock/gmock.h>

#include "core/check.h"

namespace ds::launcher {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::string error_of(const std::vector<std::string>& words) {
  try {
    parse_options(words);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "no error";
}

TEST(Options, EverythingFromTheProgramOnIsTheProgramsOwn) {
  const Options options = parse_options({"--num_procs", "2", "./train", "--num_procs", "9", "-q", "--", "x", "--help"});
  EXPECT_EQ(options.num_procs, 2);
  EXPECT_EQ(options.program, "./train");
  EXPECT_THAT(options.arguments, ElementsAre("--num_procs", "9", "-q", "--", "x", "--help"));
  EXPECT_EQ(options.verbosity, Verbosity::kInfo);
}

TEST(Options, ADoubleDashEndsTheFlags) {
  const Options options = parse_options({"--", "-odd-name", "a"});
  EXPECT_EQ(options.program, "-odd-name");
  EXPECT_THAT(options.arguments, ElementsAre("a"));
}

TEST(Options, Defaults) {
  const Options options = parse_options({"p"});
  EXPECT_EQ(options.num_procs, std::nullopt);
  EXPECT_EQ(options.master_port, std::nullopt);
  EXPECT_EQ(options.master_addr, "");
  EXPECT_FALSE(options.bind_cores);
  EXPECT_EQ(options.failure_grace_seconds, 5);
  EXPECT_EQ(options.signal_grace_seconds, 30);
  EXPECT_THAT(options.arguments, IsEmpty());
}

TEST(Options, DeepSpeedsSpelling) {
  for (const char* flag : {"--num_gpus", "--num_accelerators"}) {
    const Options options = parse_options({flag, "4", "p"});
    EXPECT_EQ(options.num_procs, 4);
    EXPECT_TRUE(options.count_is_gpus);
  }
  const Options options = parse_options({"--master_port=1234", "--master_addr", "127.0.0.1", "--bind_cores_to_rank",
                                         "--bind_core_list", "0-1,3", "--enable_each_rank_log", "logs", "--log_level",
                                         "warning", "--no_local_rank", "--no_python", "p"});
  EXPECT_EQ(options.master_port, 1234);
  EXPECT_THAT(options.bind_core_list, ElementsAre(0, 1, 3));
  EXPECT_EQ(options.rank_log_dir, "logs");
  EXPECT_EQ(options.verbosity, Verbosity::kWarning);
  EXPECT_EQ(parse_options({"-q", "p"}).verbosity, Verbosity::kError);
}

TEST(Options, RefusesManyMachinesByName) {
  for (const char* flag : {"-H", "--hostfile", "-i", "--include", "-e", "--exclude", "--num_nodes", "--node_rank",
                           "--launcher", "--launcher_args", "--force_multi", "--no_ssh", "--ssh_port"}) {
    EXPECT_THAT(error_of({"--num_procs", "2", flag, "x", "p"}),
                AllOf(HasSubstr(std::string(flag) + ": "), HasSubstr("many machines is not in this version")));
  }
  EXPECT_THAT(error_of({"--hostfile=hosts", "p"}), HasSubstr("--hostfile: launching on many machines"));
  EXPECT_THAT(error_of({"--num-nodes=2", "p"}), HasSubstr("--num-nodes: launching on many machines"));
}

TEST(Options, RefusesOtherFlagsOfDeepSpeedByName) {
  EXPECT_THAT(error_of({"--module", "p"}), HasSubstr("not Python modules"));
  EXPECT_THAT(error_of({"--autotuning", "run", "p"}), HasSubstr("autotuning is not in this version"));
  EXPECT_THAT(error_of({"--elastic_training", "p"}), HasSubstr("elastic training"));
  EXPECT_THAT(error_of({"--save_pid", "p"}), HasSubstr("no pid file"));
}

TEST(Options, SuggestsTheNearestFlag) {
  EXPECT_THAT(error_of({"--num_proc", "2", "p"}), HasSubstr("unknown flag --num_proc: did you mean --num_procs?"));
  EXPECT_THAT(error_of({"--master-port", "2", "p"}), HasSubstr("did you mean --master_port?"));
  EXPECT_THAT(error_of({"--bind_cores", "p"}), HasSubstr("did you mean --bind_cores_to_rank?"));
  EXPECT_THAT(error_of({"--frobnicate", "p"}), AllOf(HasSubstr("unknown flag --frobnicate"), HasSubstr("--help")));
}

TEST(Options, RefusesWrongValues) {
  EXPECT_THAT(error_of({"--num_procs", "0", "p"}), HasSubstr("--num_procs"));
  EXPECT_THAT(error_of({"--num_procs", "two", "p"}), HasSubstr("--num_procs"));
  EXPECT_THAT(error_of({"--num_procs", "2", "--num_gpus", "2", "p"}), HasSubstr("--num_gpus"));
  EXPECT_THAT(error_of({"--master_port", "70000", "p"}), HasSubstr("--master_port"));
  EXPECT_THAT(error_of({"--log_level", "loud", "p"}), HasSubstr("loud"));
  EXPECT_THAT(error_of({"--bind_core_list", "0-", "p"}), HasSubstr("core list"));
  EXPECT_THAT(error_of({"--failure_grace", "-1", "p"}), HasSubstr("--failure_grace"));
  EXPECT_THAT(error_of({"--num_procs", "2"}), HasSubstr("no program given"));
  EXPECT_THAT(error_of({"--num_procs"}), HasSubstr("--num_procs"));
}

// The surface of the command line: a change here is a change for users.
TEST(Options, HelpNamesEveryFlag) {
  const std::string help = parse_options({"--help"}).answer.value_or("");
  for (const char* flag :
       {"--num_procs", "--num_gpus,--num_accelerators", "--master_addr", "--master_port", "--bind_cores_to_rank",
        "--bind_core_list", "--enable_each_rank_log", "--log_level", "-q,--quiet", "--failure_grace", "--signal_grace",
        "--no_local_rank", "--no_python", "--version"}) {
    EXPECT_THAT(help, HasSubstr(flag));
  }
  EXPECT_THAT(parse_options({"--version"}).answer.value_or(""), HasSubstr("ds-launch of dsengine"));
}

}  // namespace
}  // namespace ds::launcher
