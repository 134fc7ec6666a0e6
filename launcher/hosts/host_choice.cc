#include "launcher/hosts/host_choice.h"

#include <unistd.h>

#include <filesystem>
#include <numeric>

#include "core/check.h"
#include "launcher/machine/rendezvous_port.h"

namespace ds::launcher {
namespace {

constexpr char kLocalHost[] = "localhost";

std::vector<int> slots_up_to(int count) {
  std::vector<int> slots(static_cast<size_t>(count));
  std::iota(slots.begin(), slots.end(), 0);
  return slots;
}

std::vector<Host> narrow(std::vector<Host> hosts, const Options& options) {
  if (!options.include.empty()) return choose_hosts(hosts, Choice::kInclude, options.include);
  if (!options.exclude.empty()) return choose_hosts(hosts, Choice::kExclude, options.exclude);
  if (options.total_procs) {
    hosts = limit_hosts(std::move(hosts), options.num_nodes, std::nullopt, options.count_flag);
    return limit_ranks(std::move(hosts), *options.total_procs, options.count_flag);
  }
  return limit_hosts(std::move(hosts), options.num_nodes, options.num_procs, options.count_flag);
}

// Hosts without a hostfile: all alike, and known by their number only.
std::vector<Host> numbered_hosts(const Options& options) {
  require<ConfigError>(
      options.num_nodes && options.num_procs, "--node_rank ", *options.node_rank,
      ": how many hosts and ranks are there? Give --hostfile, or --num_nodes and --num_procs (ranks on "
      "each host)");
  std::vector<Host> hosts;
  for (int node = 0; node < *options.num_nodes; ++node) {
    hosts.push_back({.name = cat("node ", node), .slots = slots_up_to(*options.num_procs)});
  }
  return hosts;
}

HostChoice choose_by_hand(const Options& options, std::vector<Host> hosts) {
  const int count = static_cast<int>(hosts.size());
  require<ConfigError>(*options.node_rank < count, "--node_rank ", *options.node_rank, ": there are ", count,
                       " hosts, expected a number from 0 to ", count - 1);
  require<ConfigError>(count == 1 || !options.master_addr.empty(), "--node_rank without ssh needs --master_addr: an ",
                       "address of host 0 that all hosts can reach");
  return {.mode = HostChoice::Mode::kByHand, .hosts = std::move(hosts), .slots = {}, .node = *options.node_rank};
}

HostChoice choose_without_hostfile(const Options& options, int local_slots) {
  if (options.node_rank) return choose_by_hand(options, numbered_hosts(options));
  if (options.meets_at_endpoint) return {.mode = HostChoice::Mode::kMeet, .hosts = {}, .slots = {}};
  require<ConfigError>(options.num_nodes.value_or(1) == 1, "--num_nodes ", *options.num_nodes, ": which hosts? Give ",
                       "--hostfile, or start ds-launch on each host with --node_rank and --master_addr, or with ",
                       "--rdzv_endpoint");
  require<ConfigError>(!options.force_multi,
                       "--force_multi needs --hostfile, for the name by which ssh reaches a host");
  HostChoice here;
  if (!options.include.empty() || !options.exclude.empty()) {
    here.slots = narrow({{.name = kLocalHost, .slots = slots_up_to(local_slots)}}, options).front().slots;
  }
  return here;
}

}  // namespace

bool is_this_machine(const std::string& host) {
  char own[256] = "";
  gethostname(own, sizeof(own) - 1);
  return host == kLocalHost || host == own || (host.find('@') == std::string::npos && is_own_address(host));
}

std::string hosts_of(const Options& options, const std::string& default_hostfile) {
  if (!options.hostfile.empty() || options.standalone || options.meets_at_endpoint) return options.hostfile;
  return std::filesystem::exists(default_hostfile) ? default_hostfile : "";
}

HostChoice choose_where(const Options& options, int local_slots, const std::string& default_hostfile) {
  const std::string hostfile = hosts_of(options, default_hostfile);
  if (hostfile.empty()) return choose_without_hostfile(options, local_slots);
  std::vector<Host> hosts =
      narrow(is_host_list(hostfile) ? parse_host_list(hostfile, "--hostfile") : read_hostfile(hostfile), options);
  if (options.node_rank) return choose_by_hand(options, std::move(hosts));
  if (hosts.size() == 1 && !options.force_multi && is_this_machine(hosts.front().name)) {
    return {.mode = HostChoice::Mode::kHere, .hosts = {}, .slots = hosts.front().slots};
  }
  return {.mode = HostChoice::Mode::kSsh, .hosts = std::move(hosts), .slots = {}};
}

}  // namespace ds::launcher
