// The program that starts the ranks on the hosts: --launcher. Pure.
#pragma once

#include <string>
#include <string_view>

namespace ds::launcher {

enum class Launcher {
  kSsh,      // a ds-launch on each host, over connections of this one
  kPdsh,     // a ds-launch on each host, through pdsh
  kOpenMpi,  // mpirun
  kMpich,    // the mpirun of MPICH, which is hydra
  kIntelMpi,
  kSlurm,  // srun
};

// The launcher of that name. Throws ConfigError for other names.
Launcher launcher_of_name(const std::string& name);
std::string_view name_of(Launcher launcher);

// Says why a flag means nothing with this launcher, and what to do; empty: the flag goes with it. `flag`: with its
// dashes.
std::string why_not_with(Launcher launcher, const std::string& flag);

}  // namespace ds::launcher
