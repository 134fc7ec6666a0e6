// The command lines of other programs that start the ranks in place of ssh: --launcher pdsh, openmpi, mpich, impi and
// slurm. Pure, but for choose_tool_hosts().
//
// pdsh starts a ds-launch --node_rank on each host. The others start the ranks themselves, which find their place from
// the variables of mpirun or srun (comm/meeting/started_place.h). After DeepSpeed's multinode_runner.py.
#pragma once

#include <string>
#include <vector>

#include "launcher/command_line/host_list.h"
#include "launcher/command_line/options.h"

namespace ds::launcher {

struct ToolCommand {
  std::vector<std::string> words;        // argv; the first one is for messages only
  std::vector<std::string> environment;  // environment of the tool
};

// The facts that are known when the tool is started.
struct ToolSetting {
  std::vector<Host> hosts;               // empty: the tool finds hosts itself
  std::string folder;                    // where the ranks run
  std::string ds_launch;                 // the file of this program
  std::vector<std::string> environment;  // the inherited one
  std::vector<std::string> forwarded;    // entries that ranks on all hosts get
};

// The hosts that the hostfile and the flags about hosts name; this machine where only --num_procs is given; else none.
// Throws ConfigError or IoError naming the flag, host or line that is wrong.
std::vector<Host> choose_tool_hosts(const Options& options, const std::string& default_hostfile);

// The command line of the tool. Throws ConfigError for what the tool cannot do: slots that are not the first ones of a
// host, hosts with different numbers of slots or names of users, no hosts.
ToolCommand tool_command(const Options& options, const ToolSetting& setting);

// MASTER_ADDR for the ranks of these hosts: --master_addr, else the name of the first of many hosts; empty: the ranks
// of one host need none. Throws ConfigError for a name that each host has.
std::string master_of(const Options& options, const std::vector<Host>& hosts);

}  // namespace ds::launcher
