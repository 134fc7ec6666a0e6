#include "launcher/command_line/options.h"

#include <gmock/gmock.h>

#include "core/check.h"
#include "launcher/command_line/launch_lines.h"
#include "tests/support/thrown.h"

namespace ds::launcher {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::string error_of(const std::vector<std::string>& words) {
  return test::thrown_by<ConfigError>([&] { parse_options(words); });
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
  EXPECT_TRUE(options.bind_to_gpu_node);
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

TEST(Options, FlagsForManyHosts) {
  const Options options =
      parse_options({"-H", "hosts", "--num_nodes", "2", "--num_gpus", "4", "--launcher", "ssh", "--launcher_args",
                     "-i key", "--ssh_port", "2222", "--force_multi", "--save_pid", "--no_ssh_check", "p"});
  EXPECT_EQ(options.hostfile, "hosts");
  EXPECT_EQ(options.num_nodes, 2);
  EXPECT_EQ(options.num_procs, 4);
  EXPECT_EQ(options.count_flag, "--num_gpus");
  EXPECT_EQ(options.launcher_args, "-i key");
  EXPECT_EQ(options.ssh_port, 2222);
  EXPECT_TRUE(options.force_multi);
  EXPECT_TRUE(options.save_pid);
  EXPECT_EQ(parse_options({"-i", "a@b:1", "p"}).include, "a@b:1");
  EXPECT_EQ(parse_options({"-e", "a", "p"}).exclude, "a");
  EXPECT_EQ(parse_options({"--no_ssh", "--node_rank", "1", "p"}).node_rank, 1);
}

TEST(Options, NamesOfTorchrun) {
  const Options options =
      parse_options({"--nnodes", "2", "--nproc_per_node=4", "--rdzv_endpoint", "[::1]:1234", "--node_rank=0", "p"});
  EXPECT_EQ(options.num_nodes, 2);
  EXPECT_EQ(options.num_procs, 4);
  EXPECT_EQ(options.master_addr, "::1");
  EXPECT_EQ(options.master_port, 1234);
  EXPECT_TRUE(parse_options({"--standalone", "--nnodes=1", "p"}).standalone);
  EXPECT_THAT(error_of({"--rdzv_endpoint", "host", "p"}), HasSubstr("expected HOST:PORT, found 'host'"));
  EXPECT_THAT(error_of({"--rdzv_endpoint", "h:1", "--master_port", "2", "p"}), HasSubstr("--master_port"));
  EXPECT_THAT(error_of({"--standalone", "--nnodes", "2", "p"}), HasSubstr("--standalone is for one host"));
  EXPECT_THAT(error_of({"--standalone", "--hostfile", "h", "p"}), HasSubstr("--hostfile"));
}

TEST(Options, DashesAreUnderscoresUpToTheProgram) {
  const Options options =
      parse_options({"--nproc-per-node", "2", "--master-port=1234", "-q", "--log-level", "error", "p", "--num-procs"});
  EXPECT_EQ(options.num_procs, 2);
  EXPECT_EQ(options.master_port, 1234);
  EXPECT_EQ(options.program, "p");
  EXPECT_THAT(options.arguments, ElementsAre("--num-procs"));
  EXPECT_EQ(parse_options({"--", "--num-procs"}).program, "--num-procs");
}

TEST(Options, NodesThatMeetAtAnEndpoint) {
  const Options options = parse_options({"--nnodes=2", "--nproc_per_node=8", "--max_restarts=3", "--rdzv_id=7",
                                         "--rdzv_backend=c10d", "--rdzv_endpoint=host", "p"});
  EXPECT_TRUE(options.meets_at_endpoint);
  EXPECT_EQ(options.rendezvous_id, "7");
  EXPECT_EQ(options.master_addr, "host");
  EXPECT_EQ(options.master_port, 29400);
  EXPECT_EQ(options.max_restarts, 3);
  EXPECT_FALSE(parse_options({"--nnodes=2", "--rdzv_endpoint=h:1", "--node_rank=0", "p"}).meets_at_endpoint);
  EXPECT_FALSE(parse_options({"--nnodes=1", "--rdzv_endpoint=h:1", "p"}).meets_at_endpoint);
  EXPECT_EQ(parse_options({"--nnodes=2:2", "--rdzv_endpoint=h:1", "p"}).num_nodes, 2);
  EXPECT_EQ(parse_options({"--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", "p"}).master_port, std::nullopt);
  EXPECT_THAT(error_of({"--nnodes=2", "--rdzv_endpoint=h:0", "p"}), HasSubstr("a port that all nodes know"));
  EXPECT_EQ(
      parse_options({"--nnodes=2", "--rdzv_endpoint=h:1", "--rdzv_conf=join_timeout=30,x=1", "p"}).join_timeout_seconds,
      30);
  EXPECT_THAT(error_of({"--nnodes=1:2", "--rdzv_endpoint=h:1", "p"}), HasSubstr("expected one number of nodes"));
  EXPECT_THAT(error_of({"--nnodes=2", "--rdzv_backend=static", "--rdzv_endpoint=h:1", "p"}),
              HasSubstr("needs --node_rank"));
  EXPECT_THAT(error_of({"--nnodes=2", "--rdzv_backend=c10d", "p"}), HasSubstr("needs --rdzv_endpoint"));
  EXPECT_THAT(error_of({"--nnodes=2", "--rdzv_backend=etcd", "p"}), HasSubstr("expected c10d or static"));
  EXPECT_THAT(error_of({"--nnodes=2", "--rdzv_endpoint=h:1", "-H", "hosts", "p"}), HasSubstr("Leave one of the two"));
  EXPECT_THAT(error_of({"--nnodes=2", "--rdzv_endpoint=h:99999", "p"}), HasSubstr("expected HOST:PORT"));
}

TEST(Options, NamesOfAccelerateAndHorovodrun) {
  const Options options = parse_options({"--multi_gpu", "--num_processes=8", "--num_machines", "2", "--machine_rank",
                                         "1", "--main_process_ip", "10.0.0.1", "--main_process_port=1234", "p"});
  EXPECT_EQ(options.total_procs, 8);
  EXPECT_TRUE(options.count_is_gpus);
  EXPECT_EQ(options.num_nodes, 2);
  EXPECT_EQ(options.node_rank, 1);
  EXPECT_EQ(options.master_addr, "10.0.0.1");
  EXPECT_EQ(options.master_port, 1234);
  const Options horovod = parse_options({"-np", "6", "-H", "a:4,b:4", "p", "-np", "3"});
  EXPECT_EQ(horovod.total_procs, 6);
  EXPECT_EQ(horovod.hostfile, "a:4,b:4");
  EXPECT_THAT(horovod.arguments, ElementsAre("-np", "3"));
  EXPECT_THAT(error_of({"-np", "2", "--num_procs", "2", "p"}), HasSubstr("--num_procs"));
  EXPECT_THAT(error_of({"-np", "2", "--launcher", "openmpi", "p"}), HasSubstr("give --num_procs"));
  EXPECT_THAT(error_of({"--mixed_precision", "fp16", "p"}), HasSubstr("the ds_config says it"));
}

TEST(Options, CountsThatTheMachineDecides) {
  Options options = parse_options({"--nproc_per_node", "auto", "p"});
  settle_counts(options, /*has_hosts=*/false, /*gpus=*/4, /*cores=*/16);
  EXPECT_EQ(options.num_procs, 4);
  EXPECT_TRUE(options.count_is_gpus);
  options = parse_options({"--nproc_per_node", "auto", "p"});
  settle_counts(options, false, 0, 16);
  EXPECT_EQ(options.num_procs, 16);
  EXPECT_FALSE(options.count_is_gpus);
  options = parse_options({"--nproc_per_node", "cpu", "p"});
  settle_counts(options, false, 4, 16);
  EXPECT_EQ(options.num_procs, 16);
  options = parse_options({"--nproc_per_node", "gpu", "p"});
  EXPECT_THROW(settle_counts(options, false, 0, 16), ConfigError);
  EXPECT_THROW(settle_counts(options, true, 4, 16), ConfigError);
  options = parse_options({"--num_processes", "8", "--num_machines", "2", "--machine_rank", "0", "p"});
  settle_counts(options, false, 0, 16);
  EXPECT_EQ(options.num_procs, 4);
  options = parse_options({"--num_processes", "7", "--num_machines", "2", "--machine_rank", "0", "p"});
  EXPECT_THROW(settle_counts(options, false, 0, 16), ConfigError);
  EXPECT_THAT(error_of({"--nproc_per_node", "tpu", "p"}), HasSubstr("gpu, cpu and auto are there too"));
}

TEST(Options, TorchrunsVariablesAreDefaults) {
  const std::vector<std::string> kubeflow = {"PET_NNODES=2", "PET_NPROC_PER_NODE=4", "PET_NODE_RANK=1",
                                             "PET_MASTER_ADDR=job-master-0", "PET_MASTER_PORT=23456"};
  const Options options = parse_options({"p"}, kubeflow);
  EXPECT_EQ(options.num_nodes, 2);
  EXPECT_EQ(options.num_procs, 4);
  EXPECT_EQ(options.node_rank, 1);
  EXPECT_EQ(options.master_addr, "job-master-0");
  EXPECT_EQ(options.master_port, 23456);
  EXPECT_THAT(options.from_environment, HasSubstr("--node_rank 1 (PET_NODE_RANK)"));
  const Options typed = parse_options({"--num_procs", "3", "--standalone", "p"}, kubeflow);
  EXPECT_EQ(typed.num_procs, 3);
  EXPECT_FALSE(typed.node_rank || typed.num_nodes);
  const Options elastic = parse_options(
      {"p"}, {"PET_NNODES=2", "PET_RDZV_ENDPOINT=a:1", "PET_RDZV_BACKEND=c10d", "PET_RDZV_ID=x", "PET_MASTER_ADDR=b"});
  EXPECT_TRUE(elastic.meets_at_endpoint);
  EXPECT_EQ(elastic.master_addr, "a");
}

TEST(Options, WhatIsTypedWinsOverTorchrunsVariables) {
  const std::vector<std::string> count = {"PET_NPROC_PER_NODE=2", "PET_MAX_RESTARTS=3"};
  EXPECT_EQ(parse_options({"--standalone", "p"}, count).num_procs, 2);
  for (const char* typed : {"--include=localhost:1", "--exclude=localhost:1", "--hostfile=hosts"}) {
    const Options options = parse_options({typed, "p"}, count);
    EXPECT_FALSE(options.num_procs) << typed;
    EXPECT_EQ(options.max_restarts, 3) << typed;
  }
  EXPECT_EQ(parse_options({"--launcher=slurm", "p"}, count).max_restarts, 0);
  EXPECT_EQ(parse_options({"--node_rank=0", "p"}, count).max_restarts, 0);

  const std::vector<std::string> endpoint = {"PET_RDZV_ENDPOINT=a:1", "PET_RDZV_BACKEND=c10d", "PET_RDZV_ID=x"};
  EXPECT_EQ(parse_options({"--master_addr=b", "p"}, endpoint).master_addr, "b");
  EXPECT_EQ(parse_options({"--master_port=2", "p"}, endpoint).master_port, 2);
  EXPECT_EQ(parse_options({"--min_nodes=2", "p"}, {"PET_NNODES=4"}).min_nodes, 2);
}

TEST(Options, CountsOfThisMachineAreNotForOtherLaunchers) {
  for (const char* count : {"auto", "gpu", "cpu"}) {
    EXPECT_THAT(error_of({"--launcher", "slurm", "--nproc_per_node", count, "p"}),
                HasSubstr(std::string("--nproc_per_node ") + count + " does not go with --launcher slurm"));
  }
}

TEST(Options, RestartsAndElasticTraining) {
  EXPECT_EQ(parse_options({"p"}).max_restarts, 0);
  EXPECT_FALSE(parse_options({"--max_restarts", "4", "p"}).min_nodes);
  EXPECT_EQ(parse_options({"--max-restarts=4", "p"}).max_restarts, 4);
  const Options of_deepspeed =
      parse_options({"--elastic_training", "--min_elastic_nodes", "2", "--max_elastic_nodes", "3", "p"});
  EXPECT_EQ(of_deepspeed.min_nodes, 2);
  EXPECT_EQ(of_deepspeed.max_nodes, 3);
  EXPECT_EQ(of_deepspeed.max_restarts, 3);
  const Options of_torchrun = parse_options({"--nnodes", "1:4", "--max_restarts", "0", "p"});
  EXPECT_EQ(of_torchrun.min_nodes, 1);
  EXPECT_EQ(of_torchrun.max_nodes, 4);
  EXPECT_FALSE(of_torchrun.num_nodes);
  EXPECT_EQ(of_torchrun.max_restarts, 0);
  EXPECT_EQ(parse_options({"--elastic_training", "p"}).min_nodes, 1);
  EXPECT_EQ(parse_options({"--max_nodes", "2", "p"}).min_nodes, 1);
}

TEST(Options, RefusesRestartsThatDoNotMakeSense) {
  EXPECT_THAT(error_of({"--nnodes=1:x", "p"}), HasSubstr("--nnodes: expected N or MIN:MAX, found '1:x'"));
  EXPECT_THAT(error_of({"--nnodes=3:2", "p"}), HasSubstr("--min_nodes 3 is above --max_nodes 2"));
  EXPECT_THAT(error_of({"--nnodes=2", "--min_nodes", "1", "p"}), HasSubstr("--min_nodes excludes --num_nodes"));
  EXPECT_THAT(error_of({"--nnodes=2", "--elastic_training", "p"}), HasSubstr("excludes a fixed --num_nodes"));
  EXPECT_THAT(error_of({"--nnodes=1:2", "--launcher", "pdsh", "p"}), HasSubstr("--launcher pdsh excludes elastic"));
  EXPECT_THAT(error_of({"--node_rank=0", "--max_restarts", "1", "p"}), HasSubstr("--node_rank excludes"));
}

TEST(Options, RefusesFlagsThatDoNotGoTogether) {
  for (const char* flag : {"--include", "--exclude"}) {
    EXPECT_THAT(error_of({flag, "a", "--num_nodes", "1", "p"}), HasSubstr("--num_nodes"));
    EXPECT_THAT(error_of({flag, "a", "--num_procs", "1", "p"}), HasSubstr("--num_procs"));
    EXPECT_THAT(error_of({flag, "a", "--num_gpus", "1", "p"}), HasSubstr("--num_gpus"));
  }
  EXPECT_THAT(error_of({"--include", "a", "--exclude", "b", "p"}), HasSubstr("--exclude"));
  EXPECT_THAT(error_of({"--no_ssh", "p"}), HasSubstr("--no_ssh needs --node_rank"));
  EXPECT_THAT(error_of({"--num_nodes", "0", "p"}), HasSubstr("--num_nodes: expected a number of at least 1"));
}

TEST(Options, Launchers) {
  EXPECT_EQ(parse_options({"p"}).launcher, Launcher::kSsh);
  EXPECT_EQ(parse_options({"--launcher", "ssh", "p"}).launcher, Launcher::kSsh);
  EXPECT_EQ(parse_options({"--launcher", "pdsh", "p"}).launcher, Launcher::kPdsh);
  EXPECT_EQ(parse_options({"--launcher=openmpi", "p"}).launcher, Launcher::kOpenMpi);
  EXPECT_EQ(parse_options({"--launcher", "mpich", "p"}).launcher, Launcher::kMpich);
  EXPECT_EQ(parse_options({"--launcher", "impi", "p"}).launcher, Launcher::kIntelMpi);
  EXPECT_EQ(parse_options({"--launcher", "slurm", "--launcher_args", "-p gpu", "p"}).launcher, Launcher::kSlurm);
  EXPECT_THAT(error_of({"--launcher", "mvapich", "p"}), HasSubstr("MVAPICH is not supported"));
  EXPECT_THAT(error_of({"--launcher", "PDSH", "p"}),
              AllOf(HasSubstr("--launcher PDSH"), HasSubstr("ssh, pdsh, openmpi, mpich, impi, slurm")));
}

TEST(Options, RefusesFlagsThatALauncherCannotFollow) {
  for (const char* name : {"pdsh", "openmpi", "mpich", "impi", "slurm"}) {
    for (const auto& [flag, value] :
         {std::pair{"--check_timeout", "3"}, {"--link_timeout", "3"}, {"--max_restarts", "3"}, {"--node_rank", "0"}}) {
      EXPECT_THAT(error_of({"--launcher", name, flag, value, "p"}),
                  HasSubstr(std::string(flag) + " does not go with --launcher " + name));
    }
    EXPECT_THAT(error_of({"--launcher", name, "--standalone", "p"}), HasSubstr("--standalone does not go with"));
  }
  for (const char* name : {"openmpi", "mpich", "impi", "slurm"}) {
    EXPECT_THAT(error_of({"--launcher", name, "--bind_cores_to_rank", "p"}), HasSubstr("--launcher_args"));
    EXPECT_THAT(error_of({"--launcher", name, "--enable_each_rank_log", "d", "p"}), HasSubstr("does not go with"));
  }
  EXPECT_THAT(error_of({"--launcher", "mpich", "--ssh_port", "3", "p"}), HasSubstr("~/.ssh/config"));
  EXPECT_EQ(parse_options({"--launcher", "openmpi", "--ssh_port", "3", "p"}).ssh_port, 3);
  EXPECT_TRUE(parse_options({"--launcher", "pdsh", "--bind_cores_to_rank", "p"}).bind_cores);
}

TEST(Options, RefusesOtherFlagsOfDeepSpeedByName) {
  EXPECT_THAT(error_of({"--module", "p"}), HasSubstr("not Python modules"));
  EXPECT_THAT(error_of({"--autotuning", "run", "p"}), HasSubstr("autotuning is not in this version"));
}

TEST(Options, SuggestsTheNearestFlag) {
  EXPECT_THAT(error_of({"--num_proc", "2", "p"}), HasSubstr("unknown flag --num_proc: did you mean --num_procs?"));
  EXPECT_THAT(error_of({"--master-prt", "2", "p"}), HasSubstr("did you mean --master_port?"));
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
  for (const char* flag : {"--num_procs,--nproc_per_node",
                           "--num_gpus,--num_accelerators",
                           "-H,--hostfile",
                           "-i,--include",
                           "-e,--exclude",
                           "--num_nodes,--nnodes",
                           "--node_rank",
                           "--no_ssh",
                           "--rdzv_endpoint",
                           "--rdzv_id",
                           "--rdzv_backend",
                           "--rdzv_conf",
                           "--num_processes",
                           "--multi_gpu",
                           "--standalone",
                           "--force_multi",
                           "--launcher",
                           "--launcher_args",
                           "--ssh_port",
                           "--connect_timeout",
                           "--check_timeout",
                           "--link_timeout",
                           "--no_ssh_check",
                           "--save_pid",
                           "--master_addr",
                           "--master_port",
                           "--bind_cores_to_rank",
                           "--bind_core_list",
                           "--no_gpu_binding",
                           "--enable_each_rank_log",
                           "--log_level",
                           "-q,--quiet",
                           "--failure_grace",
                           "--signal_grace",
                           "--no_local_rank",
                           "--no_python",
                           "--version"}) {
    EXPECT_THAT(help, HasSubstr(flag));
  }
  EXPECT_THAT(parse_options({"--version"}).answer.value_or(""), HasSubstr("ds-launch of dsengine"));
}

}  // namespace
}  // namespace ds::launcher
