#include "launcher/command_line/restart_options.h"

#include <CLI/CLI.hpp>

#include "core/check.h"
#include "launcher/command_line/number_flags.h"

namespace ds::launcher {
namespace {

constexpr int kElasticRestarts = 3;

std::optional<int> small_number(const std::string& text) {
  const bool good = !text.empty() && text.size() < 6 && text.find_first_not_of("0123456789") == std::string::npos;
  return good && std::stoi(text) > 0 ? std::optional(std::stoi(text)) : std::nullopt;
}

}  // namespace

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

}  // namespace ds::launcher
