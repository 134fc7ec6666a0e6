#include "launcher/command_line/launcher_choice.h"

#include <algorithm>
#include <array>
#include <utility>

#include "core/check.h"

namespace ds::launcher {
namespace {

constexpr std::array<std::pair<std::string_view, Launcher>, 6> kLaunchers = {{{"ssh", Launcher::kSsh},
                                                                              {"pdsh", Launcher::kPdsh},
                                                                              {"openmpi", Launcher::kOpenMpi},
                                                                              {"mpich", Launcher::kMpich},
                                                                              {"impi", Launcher::kIntelMpi},
                                                                              {"slurm", Launcher::kSlurm}}};

constexpr std::string_view kOnlySsh =
    "hosts are looked at, watched and restarted over the connections of --launcher ssh only";
constexpr std::string_view kNoTool = "no program starts the other hosts then; leave --launcher out";

struct FlagOfSsh {
  std::string_view name, reason;
};

constexpr FlagOfSsh kNeverWithTools[] = {
    {"--check_timeout", kOnlySsh},    {"--link_timeout", kOnlySsh}, {"--max_restarts", kOnlySsh},
    {"--elastic_training", kOnlySsh}, {"--min_nodes", kOnlySsh},    {"--max_nodes", kOnlySsh},
    {"--join_timeout", kOnlySsh},     {"--node_rank", kNoTool},     {"--no_ssh", kNoTool},
    {"--standalone", kNoTool},
};

// Flags for the ds-launch of each host, which pdsh starts and the other tools do not.
constexpr std::string_view kOfDsLaunch[] = {"--bind_cores_to_rank",   "--bind_core_list", "--no_gpu_binding",
                                            "--enable_each_rank_log", "--failure_grace",  "--connect_timeout"};

}  // namespace

Launcher launcher_of_name(const std::string& name) {
  std::string names;
  for (const auto& [known, launcher] : kLaunchers) {
    if (name == known) return launcher;
    names += cat(names.empty() ? "" : ", ", known);
  }
  require<ConfigError>(name != "mvapich", "--launcher mvapich: MVAPICH is not supported; --launcher ssh needs no MPI, ",
                       "and --launcher mpich is for an mpirun that is hydra");
  throw ConfigError(cat("--launcher ", name, ": expected one of ", names));
}

std::string_view name_of(Launcher launcher) {
  for (const auto& [name, known] : kLaunchers) {
    if (launcher == known) return name;
  }
  return "";
}

std::string why_not_with(Launcher launcher, const std::string& flag) {
  if (launcher == Launcher::kSsh) return "";
  for (const FlagOfSsh& one : kNeverWithTools) {
    if (flag == one.name) return std::string(one.reason);
  }
  if (launcher == Launcher::kPdsh) return "";
  const std::string tool = launcher == Launcher::kSlurm ? "srun" : "mpirun";
  if (std::find(std::begin(kOfDsLaunch), std::end(kOfDsLaunch), flag) != std::end(kOfDsLaunch)) {
    return cat(tool, " starts the ranks, without a ds-launch on each host; give ", tool, " its own flag in ",
               "--launcher_args");
  }
  if (flag == "--ssh_port" && launcher != Launcher::kOpenMpi) {
    return cat(tool, " has no flag for it; set the port in ~/.ssh/config");
  }
  return "";
}

}  // namespace ds::launcher
