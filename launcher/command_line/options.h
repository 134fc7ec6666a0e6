// The command line of ds-launch: DeepSpeed's flags, then the program and its arguments.
//
//   ds-launch [flags] [--] program args...
//
// Flags end at the first word that is not one; everything from the program on is passed to it untouched. Flags that
// DeepSpeed's launcher has and this one has not are refused by name, never ignored. The names that torchrun has for the
// same things are accepted too.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "launcher/command_line/launcher_choice.h"

namespace ds::launcher {

enum class Verbosity { kError, kWarning, kInfo, kDebug };

// How the number of ranks of a host is given: as a number, by its visible GPUs, its cores, or GPUs where there are
// some.
enum class CountKind { kNumber, kAuto, kGpu, kCpu };

struct Options {
  std::optional<int> num_procs;  // ranks to start on each host; absent: one for each slot or visible GPU, or 1
  std::string count_flag = "--num_procs";     // the flag that gave the count
  CountKind count_kind = CountKind::kNumber;  // settle_counts() sets num_procs for the others
  std::string count_text;                     // as typed
  std::optional<int> total_procs;             // ranks on all hosts together
  bool count_is_gpus = false;                 // the count came as --num_gpus: it may not exceed the visible GPUs
  std::string master_addr;          // empty: 127.0.0.1, or what the first host says; else an address of the first host
  std::optional<int> master_port;   // absent: 29500, or a free port when that one is in use
  bool bind_cores = false;          // give each rank its own cores
  bool bind_to_gpu_node = true;     // with several NUMA nodes, each rank to the cores beside its GPU
  std::vector<int> bind_core_list;  // cores to share out; empty: all that this process may use
  std::string rank_log_dir;         // empty: no log files
  Verbosity verbosity = Verbosity::kInfo;
  double failure_grace_seconds = 5;  // from SIGTERM to SIGKILL after a rank failed
  double signal_grace_seconds = 30;  // from a forwarded signal to SIGKILL; 0: no limit

  std::string hostfile;                // or a list HOST:SLOTS,...; empty: kDefaultHostfile where there is one
  std::string include, exclude;        // at most one of them
  std::optional<int> num_nodes;        // the first so many hosts
  std::optional<int> node_rank;        // set: started by hand on each host, without ssh
  bool meets_at_endpoint = false;      // node ranks are given out at master_addr:master_port
  std::string rendezvous_id;           // id of the job at that endpoint
  std::string from_environment;        // flags that came from variables, for messages
  bool standalone = false;             // this machine only, whatever hostfile there is
  bool force_multi = false;            // ssh even for a hostfile with this machine only
  bool save_pid = false;               // write /tmp/PID.deepspeed on each host
  Launcher launcher = Launcher::kSsh;  // the program that starts the ranks on many hosts
  std::optional<int> ssh_port;         // absent: ssh's own choice
  std::string launcher_args;           // more words for ssh, or for what --launcher names, split as a shell does
  double connect_timeout_seconds = 5;  // time for ssh to reach a host
  double check_timeout_seconds = 30;   // time for a host to answer whether it can run the ranks
  double link_timeout_seconds = 30;    // silence after which a connection to a host counts as lost; 0: no limit

  int max_restarts = 0;               // restarts after failures
  std::optional<int> min_nodes;       // set: elastic, hosts may be lost and come back as long as so many are left
  std::optional<int> max_nodes;       // hosts to use of those that are ready; absent: all
  double join_timeout_seconds = 600;  // time until enough hosts are ready at a restart, or all nodes at the endpoint

  std::string program;                 // as typed
  std::vector<std::string> arguments;  // arguments of the program

  // Set for --help and --version: what to print on standard output before ending with exit code 0.
  std::optional<std::string> answer;
};

// The one word with which ds-launch starts itself on other hosts; see node.h.
inline constexpr std::string_view kNodeFlag = "--serve_node";

// Parses the command line; `words` are argv[1...]. Throws ConfigError that names the flag, what was expected and what
// to type instead. `environment`: entries "NAME=value"; torchrun's variables (PET_*) among them count where no flag
// says it.
Options parse_options(const std::vector<std::string>& words, const std::vector<std::string>& environment = {});

}  // namespace ds::launcher
