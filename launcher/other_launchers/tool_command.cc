#include "launcher/other_launchers/tool_command.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <numeric>
#include <string_view>

#include "core/check.h"
#include "core/flight_job.h"
#include "core/restart_request.h"
#include "launcher/command_line/shell_words.h"
#include "launcher/hosts/host_choice.h"
#include "launcher/program/forwarded_environment.h"
#include "launcher/program/forwarded_options.h"
#include "launcher/program/rank_environment.h"

namespace ds::launcher {
namespace {

using Words = std::vector<std::string>;

// Variables that an outer launcher has set: the ranks would take them for theirs.
constexpr std::array<std::string_view, 12> kPlaceVariables = {"RANK",
                                                              "LOCAL_RANK",
                                                              "WORLD_SIZE",
                                                              "LOCAL_SIZE",
                                                              "LOCAL_WORLD_SIZE",
                                                              "CROSS_RANK",
                                                              "CROSS_SIZE",
                                                              "MASTER_ADDR",
                                                              "MASTER_PORT",
                                                              "TORCHELASTIC_USE_AGENT_STORE",
                                                              kRestartFileVariable,
                                                              kFlightJobVariable};

std::string variable_of(const std::string& entry) { return entry.substr(0, entry.find('=')); }

void append(Words& words, const Words& more) { words.insert(words.end(), more.begin(), more.end()); }

std::string host_names(const std::vector<Host>& hosts) {
  std::string text;
  for (const Host& host : hosts) text += (text.empty() ? "" : ",") + host.name;
  return text;
}

// With another user than one's own: what takes names of hosts only would look for a host of that name.
void require_plain_names(const std::vector<Host>& hosts, std::string_view launcher) {
  for (const Host& host : hosts) {
    const size_t at = host.name.find('@');
    require<ConfigError>(at == std::string::npos, "--launcher ", launcher, " takes no user names, found '", host.name,
                         "'; write '", std::string_view(host.name).substr(at + 1),
                         "' in the hostfile, and the user into ~/.ssh/config ",
                         "if ssh is what reaches it, or use --launcher ssh or pdsh");
  }
}

// The number of nodes of the allocation that ds-launch runs in; 1 without one.
int allocated_nodes(const std::vector<std::string>& environment) {
  const std::string text = environment_value(environment, "SLURM_JOB_NUM_NODES").value_or("1");
  int nodes = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), nodes);
  require<ConfigError>(error == std::errc() && end == text.data() + text.size() && nodes > 0,
                       "environment variable SLURM_JOB_NUM_NODES: expected a number of hosts, found '", text,
                       "'; unset it, or give --num_nodes");
  return nodes;
}

void require_first_slots(const std::vector<Host>& hosts, std::string_view launcher) {
  for (const Host& host : hosts) {
    std::vector<int> first(host.slots.size());
    std::iota(first.begin(), first.end(), 0);
    require<ConfigError>(host.slots == first, "--launcher ", launcher, " starts ranks by their number, not on chosen ",
                         "slots, but --include or --exclude leaves other slots of ", host.name, " than the first ",
                         first.size(), "; choose whole hosts, or use --launcher ssh");
  }
}

int slots_of_each(const std::vector<Host>& hosts, std::string_view launcher) {
  const size_t slots = hosts.front().slots.size();
  for (const Host& host : hosts) {
    require<ConfigError>(host.slots.size() == slots, "--launcher ", launcher, " needs hosts with the same number of ",
                         "slots: ", hosts.front().name, " has ", slots, ", ", host.name, " ", host.slots.size(),
                         "; give --num_procs, or use --launcher openmpi or ssh");
  }
  return static_cast<int>(slots);
}

// MASTER_ADDR and MASTER_PORT as far as they are known here.
Words master_entries(const Options& options, const std::string& master) {
  Words entries;
  if (!master.empty()) entries.push_back("MASTER_ADDR=" + master);
  if (options.master_port) entries.push_back(cat("MASTER_PORT=", *options.master_port));
  return entries;
}

Words program_of(const Options& options) {
  Words words = {options.program};
  append(words, options.arguments);
  return words;
}

ToolCommand open_mpi_command(const Options& options, const ToolSetting& setting, Words entries) {
  append(entries, master_entries(options, master_of(options, setting.hosts)));
  ToolCommand command{.words = {"mpirun"}, .environment = with_entries(setting.environment, entries)};
  if (!setting.hosts.empty()) {
    std::string hosts;
    for (const Host& host : setting.hosts) hosts += cat(hosts.empty() ? "" : ",", host.name, ':', host.slots.size());
    append(command.words, {"-n", cat(count_slots(setting.hosts)), "--host", hosts});
  }
  append(command.words, {"--wdir", setting.folder});
  if (options.ssh_port) append(command.words, {"--mca", "plm_rsh_args", cat("-p ", *options.ssh_port)});
  for (const std::string& entry : entries) append(command.words, {"-x", variable_of(entry)});
  append(command.words, split_words(options.launcher_args));
  append(command.words, program_of(options));
  return command;
}

// MPICH's and Intel's mpirun pass the whole environment on.
ToolCommand hydra_command(const Options& options, const ToolSetting& setting, Words entries) {
  append(entries, master_entries(options, master_of(options, setting.hosts)));
  ToolCommand command{.words = {"mpirun"}, .environment = with_entries(setting.environment, entries)};
  if (!setting.hosts.empty()) {
    require_plain_names(setting.hosts, name_of(options.launcher));
    const int slots = slots_of_each(setting.hosts, name_of(options.launcher));
    append(command.words,
           {"-n", cat(count_slots(setting.hosts)), "-ppn", cat(slots), "-hosts", host_names(setting.hosts)});
  }
  append(command.words, {"-wdir", setting.folder});
  append(command.words, split_words(options.launcher_args));
  append(command.words, program_of(options));
  return command;
}

// srun passes the whole environment on, and the folder.
ToolCommand slurm_command(const Options& options, const ToolSetting& setting, Words entries) {
  append(entries, master_entries(options, options.master_addr));
  // A task that failed ends the others, and one SIGINT ends srun; left alone it asks for a second one.
  ToolCommand command{.words = {"srun", "--export=ALL", "--kill-on-bad-exit=1", "--quit-on-interrupt"},
                      .environment = with_entries(setting.environment, entries)};
  if (!setting.hosts.empty()) {
    require_plain_names(setting.hosts, "slurm");
    const int slots = slots_of_each(setting.hosts, "slurm");
    append(command.words, {"-n", cat(count_slots(setting.hosts)), "--nodes", cat(setting.hosts.size()), "--nodelist",
                           host_names(setting.hosts), "--ntasks-per-node", cat(slots)});
  } else {
    if (options.num_nodes) append(command.words, {"--nodes", cat(*options.num_nodes)});
    if (options.num_procs) {
      const int nodes = options.num_nodes ? *options.num_nodes : allocated_nodes(setting.environment);
      append(command.words, {"-n", cat(nodes * *options.num_procs), "--ntasks-per-node", cat(*options.num_procs)});
    }
  }
  if (options.count_is_gpus) append(command.words, {"--gpus-per-node", cat(*options.num_procs)});
  append(command.words, split_words(options.launcher_args));
  append(command.words, program_of(options));
  return command;
}

// The script that runs on each host. pdsh closes its standard input when pdsh ends, however that comes: then ds-launch
// there is asked to end. The hosts travel along, so that the hostfile need not be there. $1: the folder, $2: the
// hostfile's text; the rest: the command.
constexpr const char* kOnHost = R"(cd "$1" || exit 2
hosts=$2; shift 2; exec 3<&0
"$@" 3<&- 4<<END </dev/null &
$hosts
END
job=$!
(read -r end <&3; kill -TERM $job) 2>/dev/null &
watch=$!; wait $job; code=$?; kill $watch 2>/dev/null; exit $code)";

// Everybody on a host reads the command lines there, and pdsh has no other way: each host's environment may have it.
constexpr std::string_view kSecretEntry = "DS_JOB_SECRET=";

// pdsh takes %n, %h and %u for its own.
std::string with_doubled_percents(const std::string& text) {
  std::string doubled;
  for (const char c : text) doubled += c == '%' ? std::string("%%") : std::string(1, c);
  return doubled;
}

// The hosts in the form that ds-launch there reads: a hostfile, and what --include picks from it.
struct HostTexts {
  std::string hostfile, include;
};

HostTexts texts_of(const std::vector<Host>& hosts) {
  HostTexts texts;
  for (const Host& host : hosts) {
    const char* next = texts.hostfile.empty() ? "" : "\n";
    texts.hostfile += cat(next, host.name, " slots=", *std::max_element(host.slots.begin(), host.slots.end()) + 1);
    std::string slots;
    for (const int slot : host.slots) slots += cat(slots.empty() ? "" : ",", slot);
    texts.include += cat(texts.include.empty() ? "" : "@", host.name, ':', slots);
  }
  return texts;
}

std::string quoted(const std::string& word) { return " " + with_doubled_percents(shell_word(word)); }

std::string command_on_host(const Options& options, const ToolSetting& setting) {
  const HostTexts texts = texts_of(setting.hosts);
  std::string command = "exec sh -c" + quoted(kOnHost) + " sh" + quoted(setting.folder) + quoted(texts.hostfile);
  command += " env";
  for (const std::string& entry : setting.forwarded) {
    if (!entry.starts_with(kSecretEntry)) command += quoted(entry);
  }
  command += quoted(setting.ds_launch) + " --node_rank %n --hostfile /dev/fd/4 --include" + quoted(texts.include);
  const std::string master = master_of(options, setting.hosts);
  if (!master.empty()) command += " --master_addr" + quoted(master);
  for (const std::string& word : words_for_ranks(options)) command += quoted(word);
  return command;
}

// The command line of pdsh that starts a ds-launch on each host. Throws ConfigError when there are no hosts.
ToolCommand pdsh_command(const Options& options, const ToolSetting& setting) {
  require<ConfigError>(!setting.hosts.empty(), "--launcher pdsh needs --hostfile, for the names of the hosts");
  ToolCommand command{.words = {"pdsh", "-R", "ssh", "-S", "-b"}, .environment = setting.environment};
  const auto add = [&](const char* flag, const std::string& value) {
    command.words.emplace_back(flag);
    command.words.push_back(value);
  };
  std::string names;
  for (const Host& host : setting.hosts) names += (names.empty() ? "" : ",") + host.name;
  add("-f", cat(setting.hosts.size()));  // all at once: the ranks wait for each other
  add("-t", cat(std::max(1, static_cast<int>(std::ceil(options.connect_timeout_seconds)))));
  add("-w", names);
  if (options.ssh_port) {
    const std::string more = environment_value(setting.environment, "PDSH_SSH_ARGS_APPEND").value_or("");
    const std::string entry = cat("PDSH_SSH_ARGS_APPEND=", more, more.empty() ? "" : " ", "-p ", *options.ssh_port);
    command.environment = with_entries(command.environment, {entry});
  }
  for (std::string& word : split_words(options.launcher_args)) command.words.push_back(std::move(word));
  command.words.push_back(command_on_host(options, setting));
  return command;
}

}  // namespace

std::string master_of(const Options& options, const std::vector<Host>& hosts) {
  if (!options.master_addr.empty() || hosts.size() < 2) return options.master_addr;
  const std::string& first = hosts.front().name;
  const std::string name = first.substr(first.find('@') + 1);  // "worker-0" of "user@worker-0"
  require<ConfigError>(name != "localhost", "--launcher ", name_of(options.launcher), ": the first host is called ",
                       "localhost, a name that means another machine on each host; give --master_addr");
  return name;
}

std::vector<Host> choose_tool_hosts(const Options& options, const std::string& default_hostfile) {
  if (options.min_nodes) {
    throw ConfigError(cat("--nnodes MIN:MAX does not go with --launcher ", name_of(options.launcher), ": ",
                          why_not_with(options.launcher, "--min_nodes")));
  }
  Options through_tool = options;
  through_tool.force_multi = true;
  if (!options.hostfile.empty() || std::filesystem::exists(default_hostfile)) {
    return choose_where(through_tool, 0, default_hostfile).hosts;
  }
  require<ConfigError>(options.include.empty() && options.exclude.empty(), "--launcher ", name_of(options.launcher),
                       ": --include and --exclude need --hostfile");
  if (options.launcher == Launcher::kSlurm) return {};
  require<ConfigError>(options.num_nodes.value_or(1) == 1, "--num_nodes ", options.num_nodes.value_or(1),
                       ": which hosts? Give --hostfile");
  if (!options.num_procs) return {};
  Host here{.name = "localhost", .slots = std::vector<int>(static_cast<size_t>(*options.num_procs))};
  std::iota(here.slots.begin(), here.slots.end(), 0);
  return {here};
}

ToolCommand tool_command(const Options& options, const ToolSetting& setting) {
  ToolSetting clean = setting;
  for (std::vector<std::string>* entries : {&clean.environment, &clean.forwarded}) {
    std::erase_if(*entries, [](const std::string& entry) {
      return std::find(kPlaceVariables.begin(), kPlaceVariables.end(), variable_of(entry)) != kPlaceVariables.end();
    });
  }
  if (options.launcher != Launcher::kPdsh) require_first_slots(setting.hosts, name_of(options.launcher));
  switch (options.launcher) {
    case Launcher::kPdsh:
      return pdsh_command(options, clean);
    case Launcher::kOpenMpi:
      return open_mpi_command(options, clean, clean.forwarded);
    case Launcher::kMpich:
    case Launcher::kIntelMpi:
      return hydra_command(options, clean, clean.forwarded);
    case Launcher::kSlurm:
      return slurm_command(options, clean, clean.forwarded);
    case Launcher::kSsh:
      break;
  }
  throw InternalError("ssh is not a tool that starts ranks");
}

}  // namespace ds::launcher
