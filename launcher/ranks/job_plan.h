// Makes the plan of a Job on this machine from the options.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "launcher/command_line/notices.h"
#include "launcher/command_line/options.h"
#include "launcher/ranks/job.h"

namespace ds::launcher {

// The place of this machine among many hosts.
struct NodePlace {
  std::string host;  // what messages call it
  int node = 0, nodes = 1;
  int first_rank = 0, world_size = 1;
  std::string master_addr;
  int master_port = 0;
  std::string flight_job;  // empty: the launch id
};

// Makes the plan. `slots`: one rank for each, on the GPU of that number where there are GPUs; absent: what the options
// and the GPUs say. `place`: absent when there is only this machine; else address and port are settled. Throws
// ProgramError, ConfigError or UsageError when the ranks cannot run here.
JobPlan plan_job(const Options& options, const std::vector<std::string>& environment,
                 const std::optional<std::vector<int>>& slots, const std::optional<NodePlace>& place, Notices& notices);

// The file of the program, found with the PATH of `environment`. Throws ProgramError.
std::string find_program_in(const Options& options, const std::vector<std::string>& environment);

// The number of slots that --include can choose from on a machine without a hostfile: its GPUs, or the cores where
// there are none.
int count_local_slots(const std::vector<std::string>& environment);

// The number of visible GPUs of this machine.
int count_local_gpus(const std::vector<std::string>& environment);
// The number of cores that this process may use, no more than the control group's quota of CPU time (the CPU limit of a
// container).
int count_local_cores(const std::filesystem::path& root = "/");
// The number of ranks that plan_job() will start here without slots.
int count_ranks_here(const Options& options, const std::vector<std::string>& environment);

// A note for the user about `slots` on this machine; empty: none. Throws ConfigError for a slot without a GPU.
std::string check_slots(const std::vector<int>& slots, const std::vector<std::string>& environment);

}  // namespace ds::launcher
