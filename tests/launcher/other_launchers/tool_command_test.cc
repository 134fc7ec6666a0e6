#include "launcher/other_launchers/tool_command.h"

#include <gmock/gmock.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "core/check.h"
#include "core/text.h"
#include "launcher/other_launchers/tool_run.h"
#include "tests/support/thrown.h"

namespace ds::launcher {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsSupersetOf;
using ::testing::Not;

Options options_for(Launcher launcher) {
  Options options;
  options.launcher = launcher;
  options.program = "./train";
  options.arguments = {"--x", "100% a'b"};
  return options;
}

ToolSetting two_hosts() {
  return {.hosts = {{"me@a", {0, 1}}, {"b", {0, 1}}},
          .folder = "/home/me",
          .ds_launch = "/opt/ds-launch",
          .environment = {"HOME=/home/me", "RANK=7", "MASTER_ADDR=old", "TORCHELASTIC_USE_AGENT_STORE=True",
                          "DS_RESTART_FILE=/tmp/outer", "DS_FLIGHT_JOB=outer"},
          .forwarded = {"NCCL_DEBUG=INFO", "MINE=a b"}};
}

ToolSetting plain_hosts() {
  ToolSetting setting = two_hosts();
  setting.hosts[0].name = "a";
  return setting;
}

std::string tool_refusal(const Options& options, const ToolSetting& setting) {
  return test::thrown_by<Error>([&] { tool_command(options, setting); });
}

TEST(LaunchTool, OpenMpi) {
  Options options = options_for(Launcher::kOpenMpi);
  options.launcher_args = "--mca oob_tcp_if_include 'eth 0'";
  options.ssh_port = 2222;
  const ToolCommand command = tool_command(options, two_hosts());
  EXPECT_THAT(command.words,
              ElementsAre("mpirun", "-n", "4", "--host", "me@a:2,b:2", "--wdir", "/home/me", "--mca", "plm_rsh_args",
                          "-p 2222", "-x", "NCCL_DEBUG", "-x", "MINE", "-x", "MASTER_ADDR", "--mca",
                          "oob_tcp_if_include", "eth 0", "./train", "--x", "100% a'b"));
  EXPECT_THAT(command.environment,
              ElementsAre("HOME=/home/me", "NCCL_DEBUG=INFO", "MINE=a b", "MASTER_ADDR=a"));  // and no RANK
}

// Everybody on a machine reads the command lines of its processes.
TEST(LaunchTool, TheSecretIsOnNoCommandLine) {
  ToolSetting setting = plain_hosts();
  setting.forwarded.emplace_back("DS_JOB_SECRET=hush-hush-hush-hush");
  for (const Launcher launcher :
       {Launcher::kPdsh, Launcher::kOpenMpi, Launcher::kMpich, Launcher::kIntelMpi, Launcher::kSlurm}) {
    const ToolCommand command = tool_command(options_for(launcher), setting);
    EXPECT_THAT(command.words, Not(Contains(HasSubstr("hush")))) << name_of(launcher);
    if (launcher == Launcher::kPdsh) continue;
    EXPECT_THAT(command.environment, Contains("DS_JOB_SECRET=hush-hush-hush-hush")) << name_of(launcher);
  }
}

TEST(LaunchTool, OpenMpiTakesHostsThatDiffer) {
  ToolSetting setting = two_hosts();
  setting.hosts[1].slots = {0, 1, 2};
  EXPECT_THAT(tool_command(options_for(Launcher::kOpenMpi), setting).words, Contains("me@a:2,b:3"));
}

TEST(LaunchTool, TheMasterThatIsAskedFor) {
  Options options = options_for(Launcher::kOpenMpi);
  options.master_addr = "10.0.0.1";
  options.master_port = 1234;
  for (const Launcher launcher : {Launcher::kOpenMpi, Launcher::kMpich, Launcher::kIntelMpi, Launcher::kSlurm}) {
    options.launcher = launcher;
    const ToolCommand command = tool_command(options, plain_hosts());
    EXPECT_THAT(command.environment, IsSupersetOf({"MASTER_ADDR=10.0.0.1", "MASTER_PORT=1234"}));
    EXPECT_THAT(command.environment, Not(Contains("MASTER_ADDR=old")));
  }
}

TEST(LaunchTool, OneHostNeedsNoMaster) {
  ToolSetting setting = two_hosts();
  setting.hosts = {{"localhost", {0, 1}}};
  EXPECT_THAT(tool_command(options_for(Launcher::kOpenMpi), setting).environment,
              Not(Contains(HasSubstr("MASTER_ADDR"))));
  setting.hosts.push_back({"b", {0, 1}});
  EXPECT_THAT(tool_refusal(options_for(Launcher::kOpenMpi), setting),
              AllOf(HasSubstr("localhost"), HasSubstr("--master_addr")));
}

TEST(LaunchTool, Hydra) {
  for (const Launcher launcher : {Launcher::kMpich, Launcher::kIntelMpi}) {
    const ToolCommand command = tool_command(options_for(launcher), plain_hosts());
    EXPECT_THAT(command.words, ElementsAre("mpirun", "-n", "4", "-ppn", "2", "-hosts", "a,b", "-wdir", "/home/me",
                                           "./train", "--x", "100% a'b"));
    EXPECT_THAT(command.environment, IsSupersetOf({"NCCL_DEBUG=INFO", "MASTER_ADDR=a"}));
  }
}

TEST(LaunchTool, Slurm) {
  Options options = options_for(Launcher::kSlurm);
  options.launcher_args = "--partition gpu";
  const ToolCommand command = tool_command(options, plain_hosts());
  EXPECT_THAT(command.words, ElementsAre("srun", "--export=ALL", "--kill-on-bad-exit=1", "--quit-on-interrupt", "-n",
                                         "4", "--nodes", "2", "--nodelist", "a,b", "--ntasks-per-node", "2",
                                         "--partition", "gpu", "./train", "--x", "100% a'b"));
  EXPECT_THAT(command.environment, ElementsAre("HOME=/home/me", "NCCL_DEBUG=INFO", "MINE=a b"));
}

TEST(LaunchTool, SlurmChoosesHostsItself) {
  Options options = options_for(Launcher::kSlurm);
  ToolSetting setting = two_hosts();
  setting.hosts.clear();
  EXPECT_THAT(tool_command(options, setting).words, Not(Contains("-n")));
  options.num_procs = 4;
  EXPECT_THAT(tool_command(options, setting).words, IsSupersetOf({"-n", "4", "--ntasks-per-node"}));
  setting.environment.push_back("SLURM_JOB_NUM_NODES=3");
  EXPECT_THAT(tool_command(options, setting).words, IsSupersetOf({"-n", "12"}));
  setting.environment.back() = "SLURM_JOB_NUM_NODES=2(x2)";
  EXPECT_THAT(tool_refusal(options, setting), AllOf(HasSubstr("SLURM_JOB_NUM_NODES"), HasSubstr("found '2(x2)'")));
  options.num_nodes = 2;
  options.count_is_gpus = true;
  EXPECT_THAT(tool_command(options, setting).words, IsSupersetOf({"-n", "8", "--nodes", "2", "--gpus-per-node"}));
}

TEST(LaunchTool, Pdsh) {
  Options options = options_for(Launcher::kPdsh);
  options.launcher_args = "-u 60";
  options.ssh_port = 2222;
  options.bind_cores = true;
  options.master_port = 29511;
  ToolSetting setting = two_hosts();
  setting.hosts[1].slots = {1, 3};
  const ToolCommand command = tool_command(options, setting);
  std::vector<std::string> words = command.words;
  const std::string remote = words.back();
  words.pop_back();
  EXPECT_THAT(words, ElementsAre("pdsh", "-R", "ssh", "-S", "-b", "-f", "2", "-t", "5", "-w", "me@a,b", "-u", "60"));
  EXPECT_THAT(command.environment, Contains("PDSH_SSH_ARGS_APPEND=-p 2222"));
  const std::string hostfile = "me@a slots=2\nb slots=4", include = "me@a:0,1@b:1,3";
  EXPECT_EQ(choose_hosts(parse_hostfile(hostfile, "hosts"), Choice::kInclude, include), setting.hosts);
  EXPECT_THAT(remote, AllOf(HasSubstr("'" + hostfile + "'"), HasSubstr("'NCCL_DEBUG=INFO' 'MINE=a b'"),
                            HasSubstr("'/opt/ds-launch' --node_rank %n --hostfile /dev/fd/4 --include '" + include +
                                      "' --master_addr 'a'"),
                            HasSubstr("'--master_port' '29511'"), HasSubstr("'--bind_cores_to_rank'"),
                            HasSubstr("'--' './train' '--x' '100%% a'\\''b'")));
}

TEST(LaunchTool, WhatAToolCannotDo) {
  ToolSetting unequal = plain_hosts();
  unequal.hosts[1].slots = {0};
  for (const Launcher launcher : {Launcher::kMpich, Launcher::kIntelMpi, Launcher::kSlurm}) {
    EXPECT_THAT(tool_refusal(options_for(launcher), unequal),
                AllOf(HasSubstr(cat("--launcher ", name_of(launcher))), HasSubstr("a has 2, b 1")));
    EXPECT_THAT(
        tool_refusal(options_for(launcher), two_hosts()),
        AllOf(HasSubstr(cat("--launcher ", name_of(launcher))), HasSubstr("'me@a'"), HasSubstr("--launcher ssh")));
  }
  ToolSetting chosen = plain_hosts();
  chosen.hosts[1].slots = {0, 2};
  for (const Launcher launcher : {Launcher::kOpenMpi, Launcher::kMpich, Launcher::kSlurm}) {
    EXPECT_THAT(tool_refusal(options_for(launcher), chosen), AllOf(HasSubstr("chosen slots"), HasSubstr(" b ")));
  }
  ToolSetting none = two_hosts();
  none.hosts.clear();
  EXPECT_THAT(tool_refusal(options_for(Launcher::kPdsh), none), HasSubstr("--launcher pdsh needs --hostfile"));
}

TEST(LaunchTool, HostsWithoutAHostfile) {
  const std::string none = "/no/such/hostfile";
  Options options = options_for(Launcher::kOpenMpi);
  EXPECT_TRUE(choose_tool_hosts(options, none).empty());
  options.num_procs = 3;
  EXPECT_THAT(choose_tool_hosts(options, none), ElementsAre(Host{.name = "localhost", .slots = {0, 1, 2}}));
  const auto refusal = [&] { return test::thrown_by<Error>([&] { choose_tool_hosts(options, none); }); };
  options.num_nodes = 2;
  EXPECT_THAT(refusal(), HasSubstr("--hostfile"));
  options.launcher = Launcher::kSlurm;
  EXPECT_TRUE(choose_tool_hosts(options, none).empty());
  options.include = "a";
  EXPECT_THAT(refusal(), HasSubstr("--include"));
  options.min_nodes = 1;
  EXPECT_THAT(refusal(), HasSubstr("--nnodes MIN:MAX does not go with --launcher slurm"));
}

TEST(LaunchTool, TheMpirunOfAnotherMpi) {
  EXPECT_TRUE(is_version_of(Launcher::kOpenMpi, "mpirun.openmpi (OpenRTE) 4.1.4"));
  EXPECT_TRUE(is_version_of(Launcher::kOpenMpi, "mpirun (Open MPI) 5.0.3"));
  EXPECT_FALSE(is_version_of(Launcher::kOpenMpi, "HYDRA build details:"));
  EXPECT_TRUE(is_version_of(Launcher::kMpich, "HYDRA build details:"));
  EXPECT_FALSE(is_version_of(Launcher::kMpich, "mpirun (Open MPI) 5.0.3"));
  EXPECT_FALSE(is_version_of(Launcher::kIntelMpi, "HYDRA build details:"));
  EXPECT_TRUE(is_version_of(Launcher::kIntelMpi, "Intel(R) MPI Library for Linux* OS"));
  EXPECT_FALSE(is_version_of(Launcher::kIntelMpi, "mpirun (Open MPI) 5.0.3"));
}

// Two folders as they are in a PATH: the mpirun of one MPI hides that of the other, which has a name of its own too.
TEST(LaunchTool, FindsTheMpirunOfItsMpi) {
  const std::filesystem::path folder = std::filesystem::path(::testing::TempDir()) / cat("tools-", getpid());
  std::filesystem::create_directories(folder);
  const auto make = [&](const char* name, const char* version) {
    const std::string file = (folder / name).string();
    std::ofstream(file) << "#!/bin/sh\n[ \"$1\" = --version ] && echo '" << version << "'\n";
    std::filesystem::permissions(file, std::filesystem::perms::owner_all);
    return file;
  };
  const std::vector<std::string> environment = {cat("PATH=", folder.string(), ":/bin")};
  const std::string hydra = make("mpirun", "HYDRA build details:");
  EXPECT_EQ(find_tool(Launcher::kMpich, environment), hydra);
  EXPECT_THAT(test::thrown_by<Error>([&] { find_tool(Launcher::kIntelMpi, environment); }),
              AllOf(HasSubstr(hydra), HasSubstr("is of another MPI")));
  const std::string open_mpi = make("mpirun.openmpi", "mpirun (Open MPI) 5.0.3");
  EXPECT_EQ(find_tool(Launcher::kOpenMpi, environment), open_mpi);
  std::filesystem::remove_all(folder);
}

TEST(LaunchTool, AToolThatIsMissingIsNamedWithItsPackage) {
  for (const auto& [launcher, package] :
       {std::pair{Launcher::kPdsh, "pdsh"}, std::pair{Launcher::kOpenMpi, "openmpi-bin"},
        std::pair{Launcher::kMpich, "mpich"}, std::pair{Launcher::kIntelMpi, "oneAPI"},
        std::pair{Launcher::kSlurm, "slurm-client"}}) {
    EXPECT_THAT(test::thrown_by<Error>([&] { find_tool(launcher, {"PATH=/no/such/folder"}); }),
                AllOf(HasSubstr(cat("--launcher ", name_of(launcher))), HasSubstr(package)));
  }
}

}  // namespace
}  // namespace ds::launcher
