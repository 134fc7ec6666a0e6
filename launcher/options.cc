#include "launcher/options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <numeric>
#include <string_view>

#include "core/check.h"
#include "launcher/core_list.h"

namespace ds::launcher {
namespace {

struct RefusedFlag {
  std::string_view name;
  std::string_view reason;
};

constexpr std::string_view kManyMachines =
    "launching on many machines is not in this version of ds-launch, which starts ranks on this machine only; start "
    "the ranks of each machine yourself with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT set";
constexpr std::string_view kPythonOnly =
    "ds-launch runs programs, not Python modules or environments; leave the flag out";
constexpr std::string_view kElastic = "elastic training is not in this version of ds-launch; leave the flag out";

// Flags of DeepSpeed's launcher (0.19.8, elastic ones of 0.19.6) that this one does not offer.
constexpr std::array kRefusedFlags = {
    RefusedFlag{"-H", kManyMachines},
    RefusedFlag{"--hostfile", kManyMachines},
    RefusedFlag{"-i", kManyMachines},
    RefusedFlag{"--include", kManyMachines},
    RefusedFlag{"-e", kManyMachines},
    RefusedFlag{"--exclude", kManyMachines},
    RefusedFlag{"--num_nodes", kManyMachines},
    RefusedFlag{"--node_rank", kManyMachines},
    RefusedFlag{"--launcher", kManyMachines},
    RefusedFlag{"--launcher_args", kManyMachines},
    RefusedFlag{"--force_multi", kManyMachines},
    RefusedFlag{"--no_ssh", kManyMachines},
    RefusedFlag{"--no_ssh_check", kManyMachines},
    RefusedFlag{"--ssh_port", kManyMachines},
    RefusedFlag{"--module", kPythonOnly},
    RefusedFlag{"--venv_script", kPythonOnly},
    RefusedFlag{"--save_pid", "ds-launch writes no pid file; its pid is known to the shell as $!"},
    RefusedFlag{"--autotuning", "autotuning is not in this version of ds-launch; leave the flag out"},
    RefusedFlag{"--elastic_training", kElastic},
    RefusedFlag{"--min_elastic_nodes", kElastic},
    RefusedFlag{"--max_elastic_nodes", kElastic},
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
  int procs = 0, gpus = 0, port = 0;
  std::string core_list;
  bool quiet = false, without_python = false, without_local_rank = false;
};

const std::map<std::string, Verbosity>& levels() {
  static const std::map<std::string, Verbosity> levels = {
      {"trace", Verbosity::kDebug},     {"debug", Verbosity::kDebug}, {"info", Verbosity::kInfo},
      {"warning", Verbosity::kWarning}, {"error", Verbosity::kError}, {"critical", Verbosity::kError}};
  return levels;
}

void declare_rank_flags(CLI::App& app, RawFlags& raw, Options& options) {
  auto* procs = app.add_option("--num_procs", raw.procs, "ranks to start (default: one for each visible GPU, else 1)");
  procs->check(CLI::Range(1, 1 << 16));
  app.add_option("--num_gpus,--num_accelerators", raw.gpus, "the same, at most the visible GPUs")
      ->check(CLI::Range(1, 1 << 16))
      ->excludes(procs);
  app.add_option("--master_addr", options.master_addr, "address of this machine where rank 0 listens (127.0.0.1)");
  app.add_option("--master_port", raw.port, "port where rank 0 listens (29500, or a free one)")
      ->check(CLI::Range(1, 65535));
  app.add_flag("--bind_cores_to_rank", options.bind_cores, "give each rank its own cores; sets OMP_NUM_THREADS");
  app.add_option("--bind_core_list", raw.core_list, "cores to share out, for instance 0-3,8");
  app.add_flag("--no_local_rank", raw.without_local_rank, "accepted; --local_rank is never added, LOCAL_RANK is set");
  app.add_flag("--no_python", raw.without_python, "accepted; ds-launch always runs the program itself");
}

void declare_job_flags(CLI::App& app, RawFlags& raw, Options& options) {
  app.add_option("--enable_each_rank_log", options.rank_log_dir, "also write YYYYmmddHHMMSS_rankN.log files here");
  app.add_option("--log_level", options.verbosity, "trace, debug, info, warning, error, critical (info)")
      ->transform(CLI::CheckedTransformer(levels(), CLI::ignore_case).description(""));
  app.add_flag("-q,--quiet", raw.quiet, "say errors only (of ds-launch; the ranks' output is not touched)");
  app.add_option("--failure_grace", options.failure_grace_seconds,
                 "seconds from SIGTERM to SIGKILL for the other ranks when one failed (5)")
      ->check(CLI::Validator(CLI::NonNegativeNumber).description(""));
  app.add_option("--signal_grace", options.signal_grace_seconds,
                 "seconds that ranks have after a forwarded SIGINT, SIGTERM or SIGHUP (30; 0: no limit)")
      ->check(CLI::Validator(CLI::NonNegativeNumber).description(""));
  app.set_version_flag("--version", "ds-launch of dsengine " DS_VERSION);
}

}  // namespace

Options parse_options(const std::vector<std::string>& words) {
  Options options;
  RawFlags raw;
  CLI::App app("Starts the ranks of a training program on this machine and ends them together.", "ds-launch");
  app.formatter(std::make_shared<HelpFormatter>());
  app.prefix_command();
  declare_rank_flags(app, raw, options);
  declare_job_flags(app, raw, options);
  try {
    app.parse(std::vector<std::string>(words.rbegin(), words.rend()));
  } catch (const CLI::CallForHelp&) {
    options.answer = app.help();
    return options;
  } catch (const CLI::CallForVersion& version) {
    options.answer = cat(version.what(), "\n");
    return options;
  } catch (const CLI::ParseError& error) {
    throw ConfigError(cat(error.what(), " (ds-launch --help lists the flags)"));
  }
  if (app.count("--num_procs") > 0) options.num_procs = raw.procs;
  options.count_is_gpus = app.count("--num_gpus") > 0;
  if (options.count_is_gpus) options.num_procs = raw.gpus;
  if (app.count("--master_port") > 0) options.master_port = raw.port;
  if (app.count("--bind_core_list") > 0) {
    options.bind_core_list = parse_core_list(raw.core_list);
    options.bind_cores = true;
  }
  if (raw.quiet) options.verbosity = Verbosity::kError;
  take_program(app, options);
  return options;
}

}  // namespace ds::launcher
