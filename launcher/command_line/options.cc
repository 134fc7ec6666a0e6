#include "launcher/command_line/options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <numeric>
#include <string_view>

#include "core/check.h"
#include "launcher/command_line/core_list.h"
#include "launcher/command_line/host_list.h"
#include "launcher/command_line/launch_lines.h"
#include "launcher/command_line/number_flags.h"

namespace ds::launcher {
namespace {

struct RefusedFlag {
  std::string_view name;
  std::string_view reason;
};

constexpr std::string_view kPythonOnly =
    "ds-launch runs programs, not Python modules or environments; leave the flag out";

// Flags of DeepSpeed's launcher that this one does not offer.
constexpr std::array kRefusedFlags = {
    RefusedFlag{"--module", kPythonOnly},
    RefusedFlag{"--venv_script", kPythonOnly},
    RefusedFlag{"--use_deepspeed", "the ds_config says what runs; leave the flag out"},
    RefusedFlag{"--mixed_precision", "the ds_config says it: fp16, bf16 or torch_autocast; leave the flag out"},
    RefusedFlag{"--config_file", "ds-launch reads no file of accelerate; give its values as flags"},
    RefusedFlag{"--autotuning", "autotuning is not in this version of ds-launch; leave the flag out"},
};

class HelpFormatter : public CLI::Formatter {
 public:
  std::string make_usage(const CLI::App*, std::string) const override {
    return "Usage: ds-launch [flags] [--] program args...\n";
  }
};

size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t above = row[j];
      row[j] = std::min({above + 1, row[j - 1] + 1, diagonal + (a[i - 1] == b[j - 1] ? 0 : 1)});
      diagonal = above;
    }
  }
  return row[b.size()];
}

// DeepSpeed spells flags with underscores, and so do we; a dash is the most common slip.
std::string with_underscores(std::string name) {
  if (name.size() > 2) std::replace(name.begin() + 2, name.end(), '-', '_');
  return name;
}

std::string nearest_flag(const CLI::App& app, const std::string& flag) {
  std::string best;
  size_t best_distance = std::max<size_t>(2, flag.size() / 4) + 1;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) {
      const std::string typed = with_underscores(flag);
      const bool shortened = typed.size() > 5 && cat("--", name).starts_with(typed);
      const size_t distance = shortened ? 1 : edit_distance(typed, cat("--", name));
      if (distance < best_distance) {
        best_distance = distance;
        best = "--" + name;
      }
    }
  }
  return best;
}

[[noreturn]] void refuse_flag(const CLI::App& app, const std::string& word) {
  const std::string flag = word.substr(0, word.find('='));
  for (const RefusedFlag& refused : kRefusedFlags) {
    if (with_underscores(flag) == refused.name) throw ConfigError(cat(flag, ": ", refused.reason));
  }
  const std::string nearest = flag.starts_with("--") ? nearest_flag(app, flag) : "";
  throw ConfigError(cat("unknown flag ", flag, nearest.empty() ? "" : cat(": did you mean ", nearest, "?"),
                        " (ds-launch --help lists the flags; flags of the program come after the program)"));
}

// Splits what CLI11 left into program and arguments.
void take_program(const CLI::App& app, Options& options) {
  std::vector<std::string> rest = app.remaining();
  const bool marked = !rest.empty() && rest.front() == "--";
  if (marked) rest.erase(rest.begin());
  if (!rest.empty() && !marked && rest.front().starts_with("-")) refuse_flag(app, rest.front());
  require<ConfigError>(!rest.empty(),
                       "no program given: expected ds-launch [flags] program args..., for instance ds-launch "
                       "--num_procs 2 ./train --deepspeed_config ds_config.json");
  options.program = rest.front();
  options.arguments.assign(rest.begin() + 1, rest.end());
}

// Values that need a second look after parsing.
struct RawFlags {
  int gpus = 0, port = 0, ssh_port = 0, node_rank = 0;
  std::string procs, core_list, launcher, nodes;
  bool quiet = false, without_python = false, without_local_rank = false, without_check = false, without_ssh = false;
};

const std::map<std::string, CountKind>& kinds() {
  static const std::map<std::string, CountKind> kKinds = {
      {"auto", CountKind::kAuto}, {"gpu", CountKind::kGpu}, {"cpu", CountKind::kCpu}};
  return kKinds;
}

const std::map<std::string, Verbosity>& levels() {
  static const std::map<std::string, Verbosity> kLevels = {
      {"trace", Verbosity::kDebug},     {"debug", Verbosity::kDebug}, {"info", Verbosity::kInfo},
      {"warning", Verbosity::kWarning}, {"error", Verbosity::kError}, {"critical", Verbosity::kError}};
  return kLevels;
}

CLI::Validator rank_count() {
  return {[](std::string& text) -> std::string {
            if (kinds().contains(text)) return "";
            const CLI::Validator number = whole_number(1, 1 << 16);
            const std::string problem = number(text);
            return problem.empty() ? "" : cat(problem, "; gpu, cpu and auto are there too");
          },
          ""};
}

void take_count(const std::string& text, Options& options) {
  options.count_text = text;
  if (const auto kind = kinds().find(text); kind != kinds().end()) {
    options.count_kind = kind->second;
  } else {
    options.num_procs = std::stoi(text);
  }
}

void declare_rank_flags(CLI::App& app, RawFlags& raw, Options& options) {
  auto* procs = app.add_option("--num_procs,--nproc_per_node", raw.procs,
                               "ranks to start on each host: a number, gpu (its visible GPUs), cpu (its cores) or auto "
                               "(default: its slots; here: one for each visible GPU, else 1)");
  procs->transform(rank_count());
  app.add_option("--num_gpus,--num_accelerators", raw.gpus, "the same, at most the visible GPUs")
      ->transform(whole_number(1, 1 << 16))
      ->excludes(procs);
  app.add_option("--master_addr,--main_process_ip", options.master_addr,
                 "address of the first host where rank 0 listens (127.0.0.1; with many hosts: found out there)");
  app.add_option("--master_port,--main_process_port", raw.port, "port where rank 0 listens (29500, or a free one)")
      ->transform(whole_number(1, 65535));
  app.add_flag("--bind_cores_to_rank", options.bind_cores, "give each rank its own cores; sets OMP_NUM_THREADS");
  app.add_flag_callback(
      "--no_gpu_binding", [&options] { options.bind_to_gpu_node = false; },
      "leave ranks with GPUs on all cores; else each is bound to the NUMA node of its GPU");
  app.add_option("--bind_core_list", raw.core_list, "cores to share out, for instance 0-3,8");
  app.add_flag("--no_local_rank", raw.without_local_rank, "accepted; --local_rank is never added, LOCAL_RANK is set");
  app.add_flag("--no_python", raw.without_python, "accepted; ds-launch always runs the program itself");
}

void declare_host_flags(CLI::App& app, RawFlags& raw, Options& options) {
  app.add_option("-H,--hostfile,--hosts", options.hostfile,
                 cat("a file with lines 'host slots=N' (", kDefaultHostfile, " when there is one), or HOST:SLOTS,..."));
  auto* include = app.add_option("-i,--include", options.include, "run there only: NAME[:SLOT[,SLOT]][@NAME...]");
  auto* exclude = app.add_option("-e,--exclude", options.exclude, "do not run there: NAME[:SLOT[,SLOT]][@NAME...]");
  auto* nodes = app.add_option("--num_nodes,--nnodes,--num_machines", raw.nodes, "run on the first so many hosts only");
  include->excludes(exclude);
  for (CLI::Option* choice : {include, exclude}) {
    choice->excludes(nodes);
    for (const char* count : {"--num_procs", "--num_gpus"}) choice->excludes(app.get_option(count));
  }
  app.add_option("--node_rank,--machine_rank", raw.node_rank,
                 "number of this host, when each is started by hand (implies --no_ssh)")
      ->transform(whole_number(0, 1 << 16));
  app.add_flag("--no_ssh", raw.without_ssh, "start the ranks of this host only; needs --node_rank");
  auto* standalone = app.add_flag("--standalone", options.standalone, "this machine only, whatever hostfile there is");
  for (const char* other : {"--hostfile", "--node_rank", "--no_ssh"}) {
    standalone->excludes(app.get_option(other));
  }
  auto* force = app.add_flag("--force_multi", options.force_multi, "use ssh even when the hosts are this machine only");
  force->excludes(standalone);
  app.add_option("--launcher", raw.launcher,
                 "what starts the ranks on the hosts: ssh, pdsh, openmpi, mpich, impi or slurm (ssh)");
  app.add_option("--launcher_args", options.launcher_args,
                 "more words for ssh (before its own) or for what --launcher names; quotes as in a shell");
  app.add_option("--ssh_port", raw.ssh_port, "port of sshd on the hosts (ssh's own choice)")
      ->transform(whole_number(1, 65535));
  app.add_option("--connect_timeout", options.connect_timeout_seconds, "seconds for ssh to reach a host (5)")
      ->check(real_number(0, true));
  app.add_option("--check_timeout", options.check_timeout_seconds, "seconds for a host to say whether it is ready (30)")
      ->check(real_number(0, true));
  app.add_option("--link_timeout", options.link_timeout_seconds,
                 "seconds of silence after which a host counts as lost, and its ranks end (30; 0: no limit)")
      ->check(real_number(0));
  app.add_flag("--no_ssh_check", raw.without_check, "accepted; looking at the hosts costs no connection of its own");
  app.add_flag("--save_pid", options.save_pid, "on each host, write the pid of its ds-launch to /tmp/PID.deepspeed");
}

void take_launcher(const CLI::App& app, const std::string& name, Options& options) {
  if (!name.empty()) options.launcher = launcher_of_name(name);
  for (const CLI::Option* option : app.get_options()) {
    const std::string flag = cat("--", option->get_lnames().empty() ? "" : option->get_lnames().front());
    const std::string reason = option->count() > 0 ? why_not_with(options.launcher, flag) : "";
    require<ConfigError>(reason.empty(), flag, " does not go with --launcher ", name, ": ", reason);
  }
}

constexpr int kElasticRestarts = 3;

struct RestartFlags {
  int max_restarts = 0, min_nodes = 0, max_nodes = 0;
  bool elastic = false;
};

void declare_restart_flags(CLI::App& app, RestartFlags& raw, Options& options) {
  app.add_option("--max_restarts,--max-restarts", raw.max_restarts,
                 "start all ranks again after a failure, at most so often (0; 3 with elastic training)")
      ->transform(whole_number(0, 1 << 20));
  app.add_flag("--elastic_training", raw.elastic, "go on without hosts that are lost, and take them in again");
  app.add_option("--min_nodes,--min_elastic_nodes", raw.min_nodes,
                 "hosts that have to be left (1); implies --elastic_training")
      ->transform(whole_number(1, 1 << 16));
  app.add_option("--max_nodes,--max_elastic_nodes", raw.max_nodes,
                 "hosts to use at most (all); the others are spare. Implies --elastic_training")
      ->transform(whole_number(1, 1 << 16));
  app.add_option("--join_timeout", options.join_timeout_seconds,
                 "seconds to wait until enough hosts are ready at a restart, or all nodes at --rdzv_endpoint (600)")
      ->check(real_number(0));
}

std::optional<int> small_number(const std::string& text) {
  const bool good = !text.empty() && text.size() < 6 && text.find_first_not_of("0123456789") == std::string::npos;
  return good && std::stoi(text) > 0 ? std::optional(std::stoi(text)) : std::nullopt;
}

// Takes "MIN:MAX", the range of torchrun's --nnodes, as min_nodes and max_nodes; false: it is no range.
bool take_node_range(const std::string& text, Options& options) {
  const size_t colon = text.find(':');
  if (colon == std::string::npos) return false;
  options.min_nodes = small_number(text.substr(0, colon));
  options.max_nodes = small_number(text.substr(colon + 1));
  require<ConfigError>(options.min_nodes && options.max_nodes, "--nnodes: expected N or MIN:MAX, found '", text, "'");
  return true;
}

void take_restarts(const CLI::App& app, const RestartFlags& raw, Options& options) {
  for (const char* flag : {"--min_nodes", "--max_nodes"}) {
    require<ConfigError>(app.count(flag) == 0 || app.count("--num_nodes") == 0, flag, " excludes --num_nodes; use ",
                         "--min_nodes with --max_nodes, or --nnodes MIN:MAX");
  }
  require<ConfigError>(!raw.elastic || !options.num_nodes, "--elastic_training excludes a fixed --num_nodes; use ",
                       "--min_nodes and --max_nodes, or --nnodes MIN:MAX");
  if (app.count("--min_nodes") > 0) options.min_nodes = raw.min_nodes;
  if (app.count("--max_nodes") > 0) options.max_nodes = raw.max_nodes;
  const bool elastic = raw.elastic || options.min_nodes || options.max_nodes;
  if (elastic && !options.min_nodes) options.min_nodes = 1;
  require<ConfigError>(!options.max_nodes || *options.min_nodes <= *options.max_nodes, "--min_nodes ",
                       *options.min_nodes, " is above --max_nodes ", *options.max_nodes);
  options.max_restarts = app.count("--max_restarts") > 0 ? raw.max_restarts : elastic ? kElasticRestarts : 0;
  require<ConfigError>(options.launcher == Launcher::kSsh || !elastic, "--launcher ", name_of(options.launcher),
                       " excludes elastic training, which needs the connections of --launcher ssh");
  require<ConfigError>(!options.node_rank || (!elastic && options.max_restarts == 0), "--node_rank excludes ",
                       "--max_restarts and elastic training: each ds-launch knows its own host only. Let one start ",
                       "them all (--hostfile), or the batch system start them again");
}

void take_node_count(const std::string& text, Options& options) {
  if (take_node_range(text, options)) return;
  const bool good = !text.empty() && text.size() < 6 && text.find_first_not_of("0123456789") == std::string::npos;
  require<ConfigError>(good && std::stoi(text) > 0, "--num_nodes: expected a number of at least 1, found '", text, "'");
  options.num_nodes = std::stoi(text);
}

// Flags for many hosts, and which of them go together.
void take_hosts(const CLI::App& app, const RawFlags& raw, Options& options) {
  take_launcher(app, raw.launcher, options);
  if (app.count("--num_nodes") > 0) take_node_count(raw.nodes, options);
  if (app.count("--ssh_port") > 0) options.ssh_port = raw.ssh_port;
  if (app.count("--node_rank") > 0) options.node_rank = raw.node_rank;
  require<ConfigError>(!raw.without_ssh || options.node_rank, "--no_ssh needs --node_rank: the number of this host, ",
                       "from 0, in the order of the hostfile");
  require<ConfigError>(!options.standalone || options.num_nodes.value_or(1) == 1, "--standalone is for one host, but ",
                       "--nnodes is ", raw.nodes, "; leave one of them out");
}

void declare_job_flags(CLI::App& app, RawFlags& raw, Options& options) {
  app.add_option("--enable_each_rank_log", options.rank_log_dir, "also write YYYYmmddHHMMSS_rankN.log files here");
  app.add_option("--log_level", options.verbosity, "trace, debug, info, warning, error, critical (info)")
      ->transform(CLI::CheckedTransformer(levels(), CLI::ignore_case).description(""));
  app.add_flag("-q,--quiet", raw.quiet, "say errors only (of ds-launch; the ranks' output is not touched)");
  app.add_option("--failure_grace", options.failure_grace_seconds,
                 "seconds from SIGTERM to SIGKILL for the other ranks when one failed (5)")
      ->check(real_number(0));
  app.add_option("--signal_grace", options.signal_grace_seconds,
                 "seconds that ranks have after a forwarded SIGINT, SIGTERM or SIGHUP (30; 0: no limit)")
      ->check(real_number(0));
  app.set_version_flag("--version", "ds-launch of dsengine " DS_VERSION);
}

}  // namespace

Options parse_options(const std::vector<std::string>& words, const std::vector<std::string>& environment) {
  Options options;
  RawFlags raw;
  RestartFlags restarts;
  LaunchLineFlags lines;
  CLI::App app(
      "Starts the ranks of a training program, here or on many hosts, and ends them together. ds-launch parity CONFIG "
      "-- program args... compares their training with that of one rank (exit code 0: equal, 1: different, 2: nothing "
      "is compared; ds-launch parity --help).",
      "ds-launch");
  app.formatter(std::make_shared<HelpFormatter>());
  app.prefix_command();
  declare_rank_flags(app, raw, options);
  declare_host_flags(app, raw, options);
  declare_job_flags(app, raw, options);
  declare_restart_flags(app, restarts, options);
  declare_launch_line_flags(app, lines);
  const std::vector<std::string> given = words_as_ours(app, words, environment, options.from_environment);
  try {
    app.parse(std::vector<std::string>(given.rbegin(), given.rend()));
  } catch (const CLI::CallForHelp&) {
    options.answer = app.help();
    return options;
  } catch (const CLI::CallForVersion& version) {
    options.answer = cat(version.what(), "\n");
    return options;
  } catch (const CLI::ParseError& error) {
    throw ConfigError(cat(error.what(), " (ds-launch --help lists the flags)"));
  }
  if (app.count("--num_procs") > 0) take_count(raw.procs, options);
  options.count_is_gpus = app.count("--num_gpus") > 0;
  if (options.count_is_gpus) options.num_procs = raw.gpus;
  if (options.count_is_gpus) options.count_flag = "--num_gpus";
  if (app.count("--master_port") > 0) options.master_port = raw.port;
  if (app.count("--bind_core_list") > 0) {
    options.bind_core_list = parse_core_list(raw.core_list);
    options.bind_cores = true;
  }
  if (raw.quiet) options.verbosity = Verbosity::kError;
  take_hosts(app, raw, options);
  take_launch_lines(app, lines, options);
  take_restarts(app, restarts, options);
  take_program(app, options);
  return options;
}

}  // namespace ds::launcher
