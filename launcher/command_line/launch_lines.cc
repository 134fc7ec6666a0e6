#include "launcher/command_line/launch_lines.h"

#include <CLI/CLI.hpp>

#include <algorithm>
#include <array>
#include <initializer_list>
#include <set>
#include <string_view>

#include "core/check.h"
#include "core/shown_text.h"
#include "launcher/command_line/number_flags.h"

namespace ds::launcher {
namespace {

constexpr int kEndpointPort = 29400;  // of torchrun's c10d, where the endpoint names none

struct DefaultOfEnvironment {
  std::string_view variable, flag;
};
// torchrun's defaults of its flags, in the order in which they are to be read.
constexpr std::array kDefaults = {
    DefaultOfEnvironment{"PET_NNODES", "--nnodes"},
    DefaultOfEnvironment{"PET_NPROC_PER_NODE", "--nproc_per_node"},
    DefaultOfEnvironment{"PET_NODE_RANK", "--node_rank"},
    DefaultOfEnvironment{"PET_MASTER_ADDR", "--master_addr"},
    DefaultOfEnvironment{"PET_MASTER_PORT", "--master_port"},
    DefaultOfEnvironment{"PET_RDZV_ENDPOINT", "--rdzv_endpoint"},
    DefaultOfEnvironment{"PET_RDZV_BACKEND", "--rdzv_backend"},
    DefaultOfEnvironment{"PET_RDZV_ID", "--rdzv_id"},
    DefaultOfEnvironment{"PET_RDZV_CONF", "--rdzv_conf"},
    DefaultOfEnvironment{"PET_MAX_RESTARTS", "--max_restarts"},
};

std::string value_in(const std::vector<std::string>& environment, std::string_view name) {
  for (const std::string& entry : environment) {
    if (entry.starts_with(name) && entry.size() > name.size() && entry[name.size()] == '=') {
      return entry.substr(name.size() + 1);
    }
  }
  return "";
}

// Words up to the program, and which flags are among them.
class FlagReader {
 public:
  FlagReader(const CLI::App& app, const std::vector<std::string>& words) : app_(app) {
    size_t i = 0;
    while (i < words.size() && words[i].starts_with('-') && words[i] != "--") {
      const CLI::Option* const option = find(words[i]);
      if (option == nullptr) break;  // for the parser to refuse
      seen_.insert(option);
      const bool has_value = words[i].find('=') != std::string::npos || is_joined_short(words[i]);
      result_.push_back(spelled(words[i++]));
      if (!has_value && option->get_items_expected_max() > 0 && i < words.size()) result_.push_back(words[i++]);
    }
    result_.insert(result_.end(), words.begin() + static_cast<std::ptrdiff_t>(i), words.end());
  }

  const std::vector<std::string>& words() const { return result_; }
  bool has(std::string_view flag) const { return seen_.contains(app_.get_option_no_throw(std::string(flag))); }

 private:
  // "-H2": a value behind the letter. "-np" is horovodrun's and mpirun's.
  static bool is_joined_short(const std::string& word) {
    return !word.starts_with("--") && word.size() > 2 && word != "-np";
  }

  static std::string spelled(const std::string& word) {
    if (word == "-np") return "--num_processes";
    if (!word.starts_with("--")) return word;
    std::string result = word;
    std::replace(result.begin() + 2,
                 result.begin() + static_cast<std::ptrdiff_t>(std::min(word.find('='), word.size())), '-', '_');
    return result;
  }

  const CLI::Option* find(const std::string& word) const {
    const std::string name = spelled(word);
    return app_.get_option_no_throw(name.starts_with("--") ? name.substr(0, name.find('=')) : name.substr(0, 2));
  }

  const CLI::App& app_;
  std::vector<std::string> result_;
  std::set<const CLI::Option*> seen_;
};

// Whether the command line says where to run, so that variables about nodes are of something else.
bool says_where(const FlagReader& flags) {
  const auto has = [&](const char* flag) { return flags.has(flag); };
  return has("--hostfile") || has("--standalone") || has("--launcher") || has("--include") || has("--exclude");
}

// Whether the flags that are typed leave the variable a meaning: those that do not go with its flag win.
bool applies(const DefaultOfEnvironment& one, const FlagReader& flags, const std::vector<std::string>& environment) {
  const auto any = [&](std::initializer_list<const char*> names) {
    return std::any_of(names.begin(), names.end(), [&](const char* name) { return flags.has(name); });
  };
  if (flags.has(one.flag)) return false;
  if (one.flag == "--nproc_per_node") {  // else the slots of the hosts say it
    return !any({"--num_gpus", "--num_processes", "--hostfile", "--include", "--exclude", "--launcher"});
  }
  if (one.flag == "--max_restarts") return !any({"--launcher", "--node_rank"});
  if (says_where(flags)) return false;
  if (one.flag == "--nnodes") return !any({"--min_nodes", "--max_nodes", "--elastic_training"});
  const bool by_node_rank = flags.has("--node_rank") || !value_in(environment, "PET_NODE_RANK").empty();
  // A node rank and an address of the first host are enough; else nodes meet at the endpoint.
  if (one.flag.starts_with("--master_")) return by_node_rank && !flags.has("--rdzv_endpoint");
  if (one.flag.starts_with("--rdzv_")) return !by_node_rank && !any({"--master_addr", "--master_port"});
  return true;
}

// "300" of "join_timeout=300,close_timeout=30"; other parts mean nothing here.
std::string join_timeout_of(const std::string& conf) {
  constexpr std::string_view kName = "join_timeout=";
  for (size_t begin = 0; begin < conf.size();) {
    const size_t end = std::min(conf.find(',', begin), conf.size());
    const std::string part = conf.substr(begin, end - begin);
    require<ConfigError>(part.find('=') != std::string::npos, "--rdzv_conf: expected NAME=VALUE,..., found ",
                         shown_text(conf));
    if (part.starts_with(kName)) return part.substr(kName.size());
    begin = end + 1;
  }
  return "";
}

void take_endpoint(const std::string& text, bool needs_port, Options& options) {
  const size_t colon = text.rfind(':');
  const bool bare_ipv6 =
      colon != std::string::npos && text.find(':') != colon && text.back() != ']' && text.front() != '[';
  const bool has_port = colon != std::string::npos && text.find(']', colon) == std::string::npos && !bare_ipv6;
  const auto port = has_port ? parse_whole_number(text.substr(colon + 1)) : std::optional<int64_t>(kEndpointPort);
  require<ConfigError>((has_port || !needs_port) && port && *port >= 0 && *port < 65536 && !text.empty() && colon != 0,
                       "--rdzv_endpoint: expected HOST:PORT, found '", text, "'");
  require<ConfigError>(*port > 0 || !options.meets_at_endpoint, "--rdzv_endpoint ", text, ": expected a port that all ",
                       "nodes know, found 0, which is for one host");
  options.master_addr = has_port ? text.substr(0, colon) : text;
  if (options.master_addr.front() == '[' && options.master_addr.back() == ']') {
    options.master_addr = options.master_addr.substr(1, options.master_addr.size() - 2);
  }
  if (*port > 0) options.master_port = static_cast<int>(*port);  // 0, of one host: any free one
}

void take_backend(const CLI::App& app, const std::string& backend, Options& options) {
  require<ConfigError>(
      backend.empty() || backend == "c10d" || backend == "static", "--rdzv_backend ", backend,
      ": expected c10d or static; the nodes then meet at --rdzv_endpoint, without a server of its own");
  require<ConfigError>(backend != "static" || options.node_rank || options.num_nodes.value_or(1) == 1,
                       "--rdzv_backend static with several nodes needs --node_rank: the number of this host, from 0");
  require<ConfigError>(backend != "c10d" || app.count("--rdzv_endpoint") > 0 || options.num_nodes.value_or(1) == 1,
                       "--rdzv_backend c10d with several nodes needs --rdzv_endpoint HOST:PORT, where they meet");
}

}  // namespace

void declare_launch_line_flags(CLI::App& app, LaunchLineFlags& raw) {
  auto* total = app.add_option("--num_processes", raw.total,
                               "ranks on all hosts together (accelerate; -np N of horovodrun is the same)");
  total->transform(whole_number(1, 1 << 20));
  for (const char* other : {"--num_procs", "--num_gpus"}) total->excludes(app.get_option(other));
  app.add_flag("--multi_gpu", raw.multi_gpu, "the ranks of --num_processes are GPUs, not more than the visible ones");
  auto* endpoint =
      app.add_option("--rdzv_endpoint", raw.endpoint,
                     "HOST:PORT: where nodes of --nnodes meet that have no --node_rank; else --master_addr "
                     "and --master_port in one");
  endpoint->excludes(app.get_option("--master_addr"))->excludes(app.get_option("--master_port"));
  app.get_option("--standalone")->excludes(endpoint);
  app.add_option("--rdzv_id", raw.id, "name of the job: other jobs are sent away from the endpoint");
  app.add_option("--rdzv_backend", raw.backend, "c10d: node ranks by arrival at the endpoint; static: by --node_rank");
  app.add_option("--rdzv_conf", raw.conf, "join_timeout=S is read, as --join_timeout; other parts mean nothing here");
}

std::vector<std::string> words_as_ours(const CLI::App& app, const std::vector<std::string>& words,
                                       const std::vector<std::string>& environment, std::string& told) {
  const FlagReader flags(app, words);
  std::vector<std::string> result;
  for (const DefaultOfEnvironment& one : kDefaults) {
    const std::string value = value_in(environment, one.variable);
    if (value.empty() || !applies(one, flags, environment)) continue;
    result.push_back(cat(one.flag, '=', value));
    told += cat(told.empty() ? "" : ", ", one.flag, ' ', value, " (", one.variable, ')');
  }
  result.insert(result.end(), flags.words().begin(), flags.words().end());
  return result;
}

void take_launch_lines(const CLI::App& app, const LaunchLineFlags& raw, Options& options) {
  require<ConfigError>(options.count_kind == CountKind::kNumber || options.launcher == Launcher::kSsh,
                       "--nproc_per_node ", options.count_text, " does not go with --launcher ",
                       name_of(options.launcher), ": it would count this machine, not the hosts of the ranks; give a ",
                       "number, the ranks of each host");
  if (app.count("--num_processes") > 0) {
    options.total_procs = raw.total;
    options.count_flag = "--num_processes";
    options.count_is_gpus = raw.multi_gpu;
    require<ConfigError>(options.launcher == Launcher::kSsh, "--num_processes does not go with --launcher ",
                         name_of(options.launcher), "; give --num_procs, the ranks of each host");
    require<ConfigError>(options.include.empty() && options.exclude.empty(),
                         "--num_processes excludes --include and --exclude, which name the slots of the ranks");
  }
  take_backend(app, raw.backend, options);
  if (app.count("--rdzv_endpoint") > 0) {
    const bool several = options.num_nodes.value_or(1) > 1 || options.min_nodes;
    options.meets_at_endpoint = several && !options.node_rank;
    take_endpoint(raw.endpoint, !options.meets_at_endpoint, options);
  }
  options.rendezvous_id = raw.id;
  const std::string limit = join_timeout_of(raw.conf);
  if (!limit.empty() && app.count("--join_timeout") == 0) {
    const auto seconds = parse_finite_number(limit);
    require<ConfigError>(seconds && *seconds >= 0, "--rdzv_conf: join_timeout: expected seconds, found ",
                         shown_text(limit));
    options.join_timeout_seconds = *seconds;
  }
  if (!options.meets_at_endpoint) return;
  require<ConfigError>(options.hostfile.empty(),
                       "--rdzv_endpoint without --node_rank is for nodes that are each started ",
                       "by hand; with a --hostfile one ds-launch starts them all. Leave one of the two out");
  if (options.min_nodes && options.min_nodes == options.max_nodes) {
    options.num_nodes = options.min_nodes;
    options.min_nodes = options.max_nodes = std::nullopt;
  }
  require<ConfigError>(!options.min_nodes, "--nnodes MIN:MAX with --rdzv_endpoint: expected one number of nodes; ",
                       "elastic training needs the connections of --hostfile");
}

void settle_counts(Options& options, bool has_hosts, int gpus, int cores) {
  if (options.count_kind != CountKind::kNumber) {
    require<ConfigError>(!has_hosts, "--nproc_per_node ", options.count_text,
                         " does not go with a hostfile or a list of ",
                         "hosts, whose slots say how many ranks each has; leave it out");
    require<ConfigError>(options.count_kind != CountKind::kGpu || gpus > 0,
                         "--nproc_per_node gpu: expected a GPU, found ", "none visible; use auto, cpu or a number");
    const bool on_gpus = options.count_kind == CountKind::kGpu || (options.count_kind == CountKind::kAuto && gpus > 0);
    options.num_procs = on_gpus ? gpus : cores;
    options.count_is_gpus = on_gpus;
  }
  if (!options.total_procs || has_hosts) return;
  const int nodes = options.num_nodes.value_or(1);
  require<ConfigError>(*options.total_procs % nodes == 0, "--num_processes ", *options.total_procs,
                       ": expected a multiple of the number of hosts, ", nodes,
                       ", each of which runs as many; or give ", "--hostfile, or -H HOST:SLOTS,...");
  options.num_procs = *options.total_procs / nodes;
}

}  // namespace ds::launcher
